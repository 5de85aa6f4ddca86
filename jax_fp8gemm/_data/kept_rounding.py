"""f32 sums and roundings that XLA can neither remove nor fuse with what is around.

XLA may compute in f32 what the program rounds to bf16 and back, and it may make one operation of a
product and a sum. Both change bits with the kernel that an operation lands in. Here operands pass
through integers, a rounding is a lax.reduce_precision, and each product that is added is exact.

JAX has no derivative of what passes through integers. That of a rounding is the identity here.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_U = np.uint32
_EXPONENT = _U(0x7F800000)


@jax.custom_jvp
def exact_f32(x: jax.Array) -> jax.Array:
    """Returns widened(x), for an f16 x with 0 in the place of subnormal numbers."""
    if x.dtype == jnp.float16:
        return lax.reduce_precision(x.astype(jnp.float32), 5, 10)
    return widened(x)


def widened(x: jax.Array) -> jax.Array:
    """Returns bf16, f16 or f32 x in f32, after its rounding to its dtype. It has no derivative."""
    if x.dtype == jnp.float32:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    bits = bits << 16 if x.dtype == jnp.bfloat16 else _bits_of_f16(bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits_of_f16(bits: jax.Array) -> jax.Array:
    """Returns the bits of the f32 that is the number with these bits as an f16."""
    size = bits & _U(0x7FFF)
    exponent = jnp.where(size < _U(0x7C00), _U((127 - 15) << 23), _U((255 - 31) << 23))
    subnormal = lax.bitcast_convert_type(size.astype(jnp.float32) * np.float32(2**-24), jnp.uint32)
    f32_size = jnp.where(size < _U(1 << 10), subnormal, (size << 13) + exponent)
    return ((bits & _U(0x8000)) << 16) | f32_size


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns f32 x rounded to `dtype` (bf16, f16 or f32), to nearest even.

    In f16 and f32, subnormal numbers become zeros.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return flushed(x)
    exponent_bits, mantissa_bits = (8, 7) if dtype == jnp.bfloat16 else (5, 10)
    return lax.reduce_precision(x, exponent_bits, mantissa_bits).astype(dtype)


@jax.custom_jvp
def flushed(x: jax.Array) -> jax.Array:
    """Returns f32 x with 0 in the place of subnormal numbers.

    The choice is between integers. So what is added to the result is not fused with a product that
    x may be.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where((bits & _EXPONENT) == 0, _U(0), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _cast_tangent(dx: jax.Array, out: jax.Array, x: jax.Array) -> jax.Array:
    return dx.astype(jnp.float32)


exact_f32.defjvps(_cast_tangent)
flushed.defjvps(_cast_tangent)


def add_flushed(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x + y in f32, where subnormal numbers count as zeros."""
    return flushed(flushed(x) + flushed(y))


def add_rounded(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x + y of one dtype: the f32 sum, rounded once."""
    return rounded(exact_f32(x) + exact_f32(y), x.dtype)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two f32 numbers of 12 significant bits whose sum is f32 x.

    Their products with numbers of 12 bits are exact. An x below 2^-103 loses the second one.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent = bits & _EXPONENT
    is_finite = exponent != _EXPONENT
    first = jnp.where(is_finite, bits & ~_U(0xFFF), bits)
    first = jnp.where(exponent == 0, _U(0), first)
    low = (bits & _U(0xFFF)).astype(jnp.int32).astype(jnp.float32)
    has_second = is_finite & (exponent > _U(23 << 23))
    unit = jnp.where(has_second, (bits & ~_U((1 << 23) - 1)) - _U(23 << 23), _U(0))
    return lax.bitcast_convert_type(first, jnp.float32), low * lax.bitcast_convert_type(
        unit, jnp.float32
    )
