"""IEEE arithmetic on the bits of f32, in uint32: the same everywhere, subnormal numbers too.

XLA's own f32 arithmetic will not do. On a CPU it flushes subnormal numbers to zero, and it may or
may not make one operation of a product and a sum. Here each operation rounds once, to nearest even,
as PTX's fma.rn.f32, mul.rn.f32 and add.rn.f32 do. A NaN that comes out is CUDA's: 0x7fffffff.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import (
    set_xla_metadata,  # pyright: ignore[reportUnknownVariableType]  # JAX leaves it untyped
)

Bits = jax.Array  # uint32
Words = tuple[Bits, Bits]  # of 64 bits: the high one, the low one

_U = np.uint32
_SIGN = _U(1 << 31)
_MAGNITUDE = _U((1 << 31) - 1)
_IMPLICIT = _U(1 << 23)
_MANTISSA = _U((1 << 23) - 1)
_INF = _U(0x7F800000)
NAN = _U(0x7FFFFFFF)
_OF_ZERO = np.int32(-4000)  # an exponent below all others


def to_bits(x: jax.Array) -> Bits:
    """The bits of f32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: Bits) -> jax.Array:
    """The f32 with these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def fma(a: Bits, b: Bits, c: Bits) -> Bits:
    """a * b + c, rounded once; of arrays of one shape.

    It is one function of a program for all calls with this shape. Where XLA inlines a dozen of
    them, it compiles for half a minute.
    """
    return cast(jax.Array, set_xla_metadata(_fma(a, b, c), inlineable="false"))


@jax.jit
def _fma(a: Bits, b: Bits, c: Bits) -> Bits:
    """The product of 48 bits and c are held as 64-bit integers, with their first bits near the top.
    The one with the smaller exponent is shifted to the other. Bits that it loses set its last bit,
    which is below all that rounding looks at.
    """
    a_exponent, a_mantissa = _unpack(a)
    b_exponent, b_mantissa = _unpack(b)
    c_exponent, c_mantissa = _unpack(c)
    product_sign, c_sign = (a ^ b) & _SIGN, c & _SIGN
    product = _multiply(a_mantissa, b_mantissa)  # 2^60 .. 2^62
    addend = (c_mantissa << 6, jnp.zeros_like(c_mantissa))  # 2^61 .. 2^62
    is_zero = (a_mantissa == 0) | (b_mantissa == 0)
    product_exponent = jnp.where(is_zero, _OF_ZERO, a_exponent + b_exponent - 314)
    c_exponent = jnp.where(c_mantissa == 0, _OF_ZERO, c_exponent - 188)

    distance = product_exponent - c_exponent
    is_product = distance >= 0
    large = _choose(is_product, product, addend)
    small = _choose(is_product, addend, product)
    small = _shift_right(small, jnp.minimum(jnp.abs(distance), 63).astype(jnp.uint32))
    (high, low), is_negative = _add(large, small, product_sign != c_sign)
    sign = jnp.where(is_product, product_sign, c_sign) ^ jnp.where(is_negative, _SIGN, _U(0))
    sign = jnp.where((high | low) == 0, product_sign & c_sign, sign)
    exponent = jnp.maximum(product_exponent, c_exponent)
    result = sign | round_words(high, low, exponent)
    return _with_specials(result, a, b, c, product_sign)


def mul(a: Bits, b: Bits) -> Bits:
    """a * b, rounded once."""
    return fma(a, b, jnp.full_like(a, _SIGN))  # x + -0 is x for every x


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """The product of two f32 arrays, which are broadcast."""
    return from_bits(mul(*map(to_bits, jnp.broadcast_arrays(x, y))))


def add(a: Bits, b: Bits) -> Bits:
    """a + b, rounded once."""
    return fma(a, jnp.full_like(a, one), b)


def to_bfloat16(x: Bits) -> jax.Array:
    """x rounded to bfloat16, to nearest even."""
    rounded = (x + _U(0x7FFF) + ((x >> 16) & _U(1))) >> 16
    rounded = jnp.where((x & _MAGNITUDE) > _INF, _U(0x7FFF), rounded)
    return lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)


def constant(x: float) -> np.uint32:
    """The bits of x, rounded to f32."""
    return np.uint32(np.asarray(x, np.float32).view(np.uint32))


one = constant(1.0)


def _unpack(x: Bits) -> tuple[jax.Array, Bits]:
    """The biased exponent and the mantissa of 24 bits, normalised; 0 has the mantissa 0."""
    exponent, mantissa = ((x >> 23) & _U(255)).astype(jnp.int32), x & _MANTISSA
    shift = lax.clz(mantissa) - _U(8)
    is_subnormal = exponent == 0
    mantissa = jnp.where(is_subnormal, mantissa << shift, mantissa | _IMPLICIT)
    return jnp.where(is_subnormal, 1 - shift.astype(jnp.int32), exponent), mantissa


def _choose(condition: jax.Array, x: Words, y: Words) -> Words:
    return jnp.where(condition, x[0], y[0]), jnp.where(condition, x[1], y[1])


def _multiply(a: Bits, b: Bits) -> Words:
    """a * b * 2^14 for 24-bit integers."""
    half, mask = _U(12), _U((1 << 12) - 1)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    middle = a_high * b_low + a_low * b_high
    low = a_low * b_low + ((middle & mask) << half)
    high = a_high * b_high + (middle >> half) + (low >> 24)
    low = low & _U((1 << 24) - 1)
    return (high << 6) | (low >> 18), low << 14


def _shift_right(x: Words, count: Bits) -> Words:
    """Shifts by 0 .. 63; bits that are lost set the last bit. XLA shifts by 32 and more to 0."""
    high, low = x
    is_far = count >= _U(32)
    low, lost = jnp.where(is_far, high, low), jnp.where(is_far, low, _U(0))
    high, count = jnp.where(is_far, _U(0), high), count & _U(31)
    lost = lost | (low & ((_U(1) << count) - _U(1)))
    low = (low >> count) | lax.shift_left(high, _U(32) - count)
    return high >> count, low | (lost != 0).astype(jnp.uint32)


def _add(a: Words, b: Words, is_difference: jax.Array) -> tuple[Words, jax.Array]:
    """The magnitude of a + b or a - b, for a and b below 2^62, and whether it was negative."""
    (a_high, a_low), (b_high, b_low) = a, b
    flip = jnp.where(is_difference, _U(0xFFFFFFFF), _U(0))
    carry = is_difference.astype(jnp.uint32)
    b_low = (b_low ^ flip) + carry
    b_high = (b_high ^ flip) + jnp.where(b_low == 0, carry, _U(0))
    low = a_low + b_low
    high = a_high + b_high + (low < a_low).astype(jnp.uint32)
    is_negative = (high >> 31) != 0
    low = jnp.where(is_negative, _U(0) - low, low)
    high = jnp.where(is_negative, ~high + (low == 0).astype(jnp.uint32), high)
    return (high, low), is_negative


def round_words(high: Bits, low: Bits, exponent: jax.Array) -> Bits:
    """The magnitude of (high, low) * 2^exponent as f32."""
    is_low = high == 0
    zeros = jnp.where(is_low, _U(32) + lax.clz(low), lax.clz(high))
    top, rest = jnp.where(is_low, low, high), jnp.where(is_low, _U(0), low)
    count = zeros & _U(31)
    word = (top << count) | lax.shift_right_logical(rest, _U(32) - count)
    word = word | ((rest << count) != 0).astype(jnp.uint32)
    biased = exponent + (63 + 127) - zeros.astype(jnp.int32)
    # A subnormal result has its last bit at 2^-149.
    lost = jnp.clip(1 - biased, 0, 31).astype(jnp.uint32)
    is_lost = (word & ((_U(1) << lost) - _U(1))) != 0
    word = (word >> lost) | is_lost.astype(jnp.uint32)
    mantissa, rest = word >> 8, word & _U(255)
    is_up = (rest > _U(128)) | ((rest == _U(128)) & ((mantissa & _U(1)) == _U(1)))
    # The mantissa has its implicit bit, or carries to it.
    base = (jnp.clip(biased, 1, 255) - 1).astype(jnp.uint32) << 23
    result = jnp.minimum(base + mantissa + is_up.astype(jnp.uint32), _INF)
    return jnp.where((high | low) == 0, _U(0), result)


def _with_specials(result: Bits, a: Bits, b: Bits, c: Bits, product_sign: Bits) -> Bits:
    """Replaces the result where an operand is Inf or NaN."""
    a_size, b_size, c_size = a & _MAGNITUDE, b & _MAGNITUDE, c & _MAGNITUDE
    is_product_inf = (a_size == _INF) | (b_size == _INF)
    is_c_inf = c_size == _INF
    is_nan = (a_size > _INF) | (b_size > _INF) | (c_size > _INF)
    is_nan |= is_product_inf & ((a_size == 0) | (b_size == 0))
    is_nan |= is_product_inf & is_c_inf & (product_sign != (c & _SIGN))
    result = jnp.where(is_c_inf, c, result)
    result = jnp.where(is_product_inf, product_sign | _INF, result)
    return jnp.where(is_nan, NAN, result)
