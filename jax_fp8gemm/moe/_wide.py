"""Wide: numbers with 32 significant bits, computed in integers, so that their bits are specified.

XLA's f32 arithmetic has no bits of its own. It makes one operation of a product and a sum where
both meet in a kernel; on a CPU an optimization_barrier does not prevent it. Its exp differs between
machines, and the order of a reduction depends on the shape. Integers have none of this: the sum of
integers is the same in any order.

Each function here truncates toward zero to 32 bits, or says how it rounds. docs/numerics.md has the
rules, and tests/moe/wide_model.py holds them in NumPy.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_U = np.uint32
_I = np.int32
_TOP = _U(1 << 31)
_LOW_HALF = _U(0xFFFF)
_INF = _U(0x7F800000)
NAN = _U(0x7FC00000)
_OF_ZERO = _I(-(1 << 20))  # an exponent far below all others
# The most terms of a sum: each adds less than 2^16 to an int32.
MAX_TERMS = 1 << 15


class Wide(NamedTuple):
    """Numbers mantissa * 2^(exponent - 31), not negative.

    Attributes:
      mantissa: uint32, in [2^31, 2^32); 0 for zero.
      exponent: int32.
    """

    mantissa: jax.Array
    exponent: jax.Array


def power_of_two(exponent: int, like: Wide) -> Wide:
    """Returns 2^exponent in the shape of `like`."""
    return Wide(jnp.full_like(like.mantissa, _TOP), jnp.full_like(like.exponent, exponent))


def to_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of f32, uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    """Returns the f32 with these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude(bits: jax.Array) -> Wide:
    """Returns |x| of the bits of a finite f32. A subnormal number counts as zero."""
    exponent = ((bits >> 23) & _U(255)).astype(jnp.int32)
    return _nonzero(exponent != 0, (bits << 8) | _TOP, exponent - _I(127))


def to_f32(x: Wide) -> jax.Array:
    """Returns the bits of x as f32, to nearest even. What is below 2^-126 becomes 0."""
    rounded = (x.mantissa >> 8) + ((x.mantissa >> 7) & _U(1) & _is_up(x.mantissa))
    biased = x.exponent + _I(127) + (rounded >> 24).astype(jnp.int32)
    bits = (jnp.clip(biased, 0, 255).astype(jnp.uint32) << 23) | (rounded & _U((1 << 23) - 1))
    bits = jnp.where(biased >= 255, _INF, bits)
    return jnp.where((biased <= 0) | (x.mantissa == 0), _U(0), bits)


def mul(x: Wide, y: Wide) -> Wide:
    """Returns the upper 32 bits of the product of the mantissas, normalised."""
    return normalised(mulhi(x.mantissa, y.mantissa), x.exponent + y.exponent + _I(1))


def div(x: Wide, y: Wide) -> Wide:
    """Returns x / y, for y above zero."""
    is_above = x.mantissa >= y.mantissa
    quotient = _quotient(jnp.where(is_above, x.mantissa - y.mantissa, x.mantissa), y.mantissa)
    mantissa = jnp.where(is_above, _TOP | (quotient >> 1), quotient)
    exponent = x.exponent - y.exponent - (~is_above).astype(jnp.int32)
    return _nonzero(x.mantissa != 0, mantissa, exponent)


def add(x: Wide, y: Wide) -> Wide:
    """Returns x + y. Each term is first truncated to 31 bits below the larger exponent."""
    exponent = jnp.maximum(x.exponent, y.exponent)
    aligned = lambda z: (z.mantissa >> _distance(exponent, z.exponent)) >> 1
    return normalised(aligned(x) + aligned(y), exponent + _I(1))


def total(sign: jax.Array, x: Wide) -> tuple[jax.Array, Wide]:
    """Returns the sum of sign * x over the last dimension, which is kept: its sign and its size.

    Each term is truncated to 32 bits below the largest exponent. Signs are int32, 1 or -1. There
    are up to MAX_TERMS terms.
    """
    exponent = jnp.max(x.exponent, axis=-1, keepdims=True)
    units = x.mantissa >> _distance(exponent, x.exponent)
    # Of int32 with x64 too, where sums of int32 are int64.
    half = lambda part: jnp.sum(
        sign * part.astype(jnp.int32), axis=-1, keepdims=True, dtype=jnp.int32
    )
    high, low = half(units >> 16), half(units & _LOW_HALF)
    # The sum is high * 2^16 + low.
    high, low = high + (low >> 16), low & _I(0xFFFF)
    is_negative = high < 0
    high = jnp.where(is_negative, -high - (low != 0).astype(jnp.int32), high).astype(jnp.uint32)
    low = jnp.where(is_negative, -low & _I(0xFFFF), low).astype(jnp.uint32)
    count = lax.clz(high)
    few, many = jnp.minimum(count, _U(16)), jnp.maximum(count, _U(16)) - _U(16)
    low = (low >> (_U(16) - few)) << many
    mantissa = lax.shift_left(high, count) | low
    size = normalised(mantissa, exponent + _I(16) - count.astype(jnp.int32))
    return jnp.where(is_negative, _I(-1), _I(1)), size


def _nonzero(condition: jax.Array, mantissa: jax.Array, exponent: jax.Array) -> Wide:
    """Returns zero unless `condition`."""
    return Wide(jnp.where(condition, mantissa, _U(0)), jnp.where(condition, exponent, _OF_ZERO))


def normalised(mantissa: jax.Array, exponent: jax.Array) -> Wide:
    """Returns a number with any uint32 as its mantissa."""
    shift = lax.clz(mantissa)
    shifted = lax.shift_left(mantissa, shift)
    return _nonzero(mantissa != 0, shifted, exponent - shift.astype(jnp.int32))


def _distance(large: jax.Array, small: jax.Array) -> jax.Array:
    """Returns by how many bits to shift; XLA shifts by 32 to zero."""
    return jnp.minimum(large - small, _I(32)).astype(jnp.uint32)


def _is_up(mantissa: jax.Array) -> jax.Array:
    """Returns 1 unless the last 8 bits are a half, which is rounded to even, here down."""
    is_down = (mantissa & _U(0x1FF)) == _U(0x80)
    return (~is_down).astype(jnp.uint32)


def mulhi(x: jax.Array, y: jax.Array | np.uint32) -> jax.Array:
    """Returns the upper 32 bits of x * y."""
    x_high, x_low, y_high, y_low = x >> 16, x & _LOW_HALF, y >> 16, y & _LOW_HALF
    middle = x_high * y_low + ((x_low * y_low) >> 16)
    other = x_low * y_high + (middle & _LOW_HALF)
    return x_high * y_high + (middle >> 16) + (other >> 16)


def _quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns floor(2^32 x / y) for x < y, with the first bit of y set: two digits of 16 bits."""
    first, x = _digit(x, y)
    second, _ = _digit(x, y)
    return (first << 16) | second


def _digit(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns floor(2^16 x / y) and what is left of 2^16 x.

    The first half of y gives a guess, which is two too large at most (Knuth, 4.3.1, theorem B).
    """
    high, low = y >> 16, y & _LOW_HALF
    guess = lax.div(x, high)
    rest = x - guess * high
    for _ in range(2):
        is_large = (guess > _LOW_HALF) | (guess * low > (rest << 16))
        is_large = ((rest <= _LOW_HALF) & is_large).astype(jnp.uint32)
        guess, rest = guess - is_large, rest + is_large * high
    return guess, (x << 16) - guess * y
