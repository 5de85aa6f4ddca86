"""The numerics of quantisation in plain JAX.

Each block is quantised in f32. Every step is correctly rounded, so that CUDA, XLA and NumPy agree
to the bit:

    amax  = max |x|, never below 2^-92   so scale and 1 / scale are normal numbers, and an x that
                                         flush-to-zero would change becomes zero either way
    scale = amax / FMAX                  448 for e4m3fn, 57344 for e5m2
    scale = 2 ^ ceil(log2 scale)         with pow2_scale
    value = round(x * (1 / scale))       to nearest even on the FP8 grid, saturating at FMAX

A block with an Inf or a NaN becomes NaN: scale 0x7fc00000, values 0x7f. Zeros complete the blocks
at ragged edges; they are not stored.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm._data import formats

_BLOCK = formats.SCALE_BLOCK
_SMALLEST_AMAX_BITS = np.uint32((127 - 92) << 23)
_INF_BITS = np.uint32(0x7F800000)
_NAN_BITS = np.uint32(0x7FC00000)
_NAN_VALUE = np.uint8(0x7F)
_IMPLICIT_BIT = np.uint32(1 << 23)
_MANTISSA_MASK = np.uint32((1 << 23) - 1)
# FMAX = 7 * 2^p in both formats, so a scale is an exact division by 7 and a shift.
_FMAX_SHIFT = {"float8_e4m3fn": 6, "float8_e5m2": 13}


def quantize_blocks(x: jax.Array, block_m: int, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    """Quantises f32 (m, k) with one scale for each block_m x 128 block."""
    m, k = x.shape
    padded = jnp.pad(x, ((0, -m % block_m), (0, -k % _BLOCK)))
    mb, kb = padded.shape[0] // block_m, padded.shape[1] // _BLOCK
    blocks = padded.reshape(mb, block_m, kb, _BLOCK)
    # The bits of non-negative floats order as the floats do, with NaN above Inf.
    amax = jnp.max(lax.bitcast_convert_type(jnp.abs(blocks), jnp.uint32), axis=(1, 3))
    scale, reciprocal = _scale_of(amax, e5m2, pow2_scale)
    # Keeps the scales from being computed again for every value.
    scale, reciprocal = lax.optimization_barrier((scale, reciprocal))
    is_nan = jnp.isnan(scale)[:, None, :, None]
    values = _round_to_fp8(blocks * reciprocal[:, None, :, None], e5m2)
    # Chosen among bytes: XLA on GPU may select FP8 through another type and change a NaN's payload.
    bits = jnp.where(is_nan, _NAN_VALUE, lax.bitcast_convert_type(values, jnp.uint8))
    values = lax.bitcast_convert_type(bits, values.dtype)
    return [values.reshape(padded.shape)[:m, :k], scale]


def block_types(
    m: int, k: int, block_m: int, e5m2: bool, batch: Sequence[int] = ()
) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of quantize_blocks' results for (m, k), with batch dimensions in front."""
    scale_shape = formats.scale_shape((m, k), (block_m, _BLOCK))
    return [
        jax.ShapeDtypeStruct((*batch, m, k), fp8_dtype(e5m2)),
        jax.ShapeDtypeStruct((*batch, *scale_shape), jnp.float32),
    ]


def _scale_of(amax_bits: jax.Array, e5m2: bool, pow2_scale: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the scale and its reciprocal, both correctly rounded, from the bits of amax.

    The scale of a bad block is NaN. Its reciprocal is some number.

    NOTE: it computes in integers, because XLA's f32 division is not IEEE on GPU (div.full, 2 ulp),
    and XLA turns a division by a constant into a multiplication.
    """
    bits = jnp.maximum(amax_bits, _SMALLEST_AMAX_BITS)
    mantissa = (bits & _MANTISSA_MASK) | _IMPLICIT_BIT
    # mantissa / 7 * 2^3 has 24 bits, or 25 where mantissa >= 7 * 2^21: then one shift less.
    is_large = (mantissa >= np.uint32(7 << 21)).astype(jnp.uint32)
    numerator = mantissa << (np.uint32(3) - is_large)
    quotient = lax.div(numerator + np.uint32(3), np.uint32(7))  # to nearest; 7 is odd, so no ties
    exponent = (bits >> 23) - np.uint32(3 + _FMAX_SHIFT[fp8_dtype(e5m2).name]) + is_large
    # Addition, not |: a quotient rounded up to 2^24 carries into the exponent.
    scale = (exponent << 23) + quotient - _IMPLICIT_BIT
    if pow2_scale:
        scale = (scale + _MANTISSA_MASK) & ~_MANTISSA_MASK
    reciprocal = lax.bitcast_convert_type(_reciprocal_bits(scale), jnp.float32)
    scale = lax.select(amax_bits >= _INF_BITS, jnp.full_like(scale, _NAN_BITS), scale)
    return lax.bitcast_convert_type(scale, jnp.float32), reciprocal


def _reciprocal_bits(bits: jax.Array) -> jax.Array:
    """Returns the bits of 1 / x rounded to nearest, for a normal positive x with normal 1 / x.

    With x = mantissa * 2^e the wanted integer of 24 or 25 bits is 2^47 / mantissa, rounded. A float
    division that is 3 ulp off at worst gives a guess. The remainder of the guess, exact modulo
    2^32, says by how much to move it: remainder / mantissa, rounded, is between -3 and 3. No ties:
    2^48 = mantissa * odd only where mantissa is a power of two, and its remainder is a multiple.
    """
    mantissa = (bits & _MANTISSA_MASK) | _IMPLICIT_BIT
    base = np.uint32(253 << 23) - (bits & ~_MANTISSA_MASK)
    x = lax.bitcast_convert_type(bits, jnp.float32)
    guess = lax.bitcast_convert_type(1.0 / x, jnp.uint32) - base + _IMPLICIT_BIT
    # Twice the remainder, for 2^48 is 0 modulo 2^32, plus 7 / 2 times `twice`: a half to round to
    # nearest, and 3 to keep the numerator positive.
    twice = mantissa << 1
    numerator = np.uint32(7) * mantissa - twice * guess
    moved = guess + lax.div(numerator, twice) - np.uint32(3)
    return base + moved - _IMPLICIT_BIT


def _round_to_fp8(x: jax.Array, e5m2: bool) -> jax.Array:
    """Rounds f32 to FP8, to nearest even, saturating; NaN becomes some NaN.

    NOTE: astype alone will not do: XLA may round f32 to FP8 twice, through f16. After the rounding
    to the grid in f32 below, astype is exact.
    """
    info = cast("np.finfo[Any]", jnp.finfo(fp8_dtype(e5m2)))
    x = jnp.clip(x, -float(info.max), float(info.max))
    step = float(info.smallest_subnormal)
    subnormal = lax.round(x * (1 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    x = jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, normal)
    return x.astype(fp8_dtype(e5m2))


def fp8_dtype(e5m2: bool) -> np.dtype:
    return jnp.dtype(jnp.float8_e5m2 if e5m2 else jnp.float8_e4m3fn)
