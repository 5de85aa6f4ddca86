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
_ABS_MASK = np.uint32(0x7FFFFFFF)
_NAN_BITS = np.uint32(0x7FC00000)
_NAN_VALUE = np.uint8(0x7F)
_IMPLICIT_BIT = np.uint32(1 << 23)
_MANTISSA_MASK = np.uint32((1 << 23) - 1)
# FMAX = 7 * 2^p in both formats, so a scale is an exact division by 7 and a shift.
_FMAX_SHIFT = {"float8_e4m3fn": 6, "float8_e5m2": 13}


def quantize_blocks(x: jax.Array, block_m: int, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    """Quantises f32 (m, k) with one scale for each block_m x 128 block."""
    m, k = x.shape
    pad = -m % block_m, -k % _BLOCK
    padded = jnp.pad(x, ((0, pad[0]), (0, pad[1]))) if any(pad) else x
    mb, kb = padded.shape[0] // block_m, padded.shape[1] // _BLOCK
    blocks = padded.reshape(mb, block_m, kb, _BLOCK)
    # Keeps the scales from being computed again for every value.
    scale = lax.optimization_barrier(_scale_of(_amax_bits(blocks), e5m2, pow2_scale))
    scale_bits = lax.bitcast_convert_type(scale, jnp.uint32)[:, None, :, None]
    reciprocal = lax.bitcast_convert_type(_reciprocal_bits(scale_bits), jnp.float32)
    bits = _round_to_fp8(blocks * reciprocal, e5m2)
    bits = jnp.where(scale_bits == _NAN_BITS, _NAN_VALUE, bits)
    values = lax.bitcast_convert_type(bits, fp8_dtype(e5m2))
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


def _amax_bits(blocks: jax.Array) -> jax.Array:
    """Returns the bits (mb, kb) of max |x| of blocks (mb, block_m, kb, 128)."""
    # The bits of non-negative floats order as the floats do, with NaN above Inf.
    # NOTE: XLA on CPU takes the maximum over a dimension above 32 in two steps of one kernel each.
    mb, block_m, kb, _ = blocks.shape
    rows = (4, 32) if block_m == _BLOCK else (1, 1)
    bits = lax.bitcast_convert_type(blocks.reshape(mb, *rows, kb, 4, 32), jnp.uint32)
    return lax.reduce_max(bits & _ABS_MASK, (1, 2, 4, 5))


def _scale_of(amax_bits: jax.Array, e5m2: bool, pow2_scale: bool) -> jax.Array:
    """Returns the scale, correctly rounded, from the bits of amax. That of a bad block is NaN.

    NOTE: it computes in integers, because XLA's f32 division is not IEEE on GPU (div.full, 2 ulp),
    and XLA turns a division by a constant into a multiplication.
    """
    bits = lax.max(amax_bits, _SMALLEST_AMAX_BITS)
    mantissa = (bits & _MANTISSA_MASK) | _IMPLICIT_BIT
    # mantissa / 7 * 2^3 has 24 bits, or 25 where mantissa >= 7 * 2^21: then one shift less.
    is_large = (mantissa >= np.uint32(7 << 21)).astype(jnp.uint32)
    numerator = mantissa << (np.uint32(3) - is_large)
    quotient = _seventh(numerator + np.uint32(3))  # to nearest; 7 is odd, so no ties
    exponent = (bits >> 23) - np.uint32(3 + _FMAX_SHIFT[fp8_dtype(e5m2).name]) + is_large
    # Addition, not |: a quotient rounded up to 2^24 carries into the exponent.
    scale = (exponent << 23) + quotient - _IMPLICIT_BIT
    if pow2_scale:
        scale = (scale + _MANTISSA_MASK) & ~_MANTISSA_MASK
    scale = jnp.where(amax_bits >= _INF_BITS, _NAN_BITS, scale)
    return lax.bitcast_convert_type(scale, jnp.float32)


def _seventh(x: jax.Array) -> jax.Array:
    """Returns x // 7 for uint32 x < 2^31, without the division that XLA on CPU does not fuse.

    The shifts add up 8/7 of x / 8 = x / 7, less 5 at most for what they cut off.
    """
    guess = (x >> 1) + (x >> 4)
    guess += guess >> 6
    guess += guess >> 12
    guess = (guess + (guess >> 24)) >> 2
    return guess + ((x - guess * np.uint32(7) + np.uint32(1)) >> 3)


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
    moved = guess - np.uint32(3)
    for i in range(1, 7):
        moved += (numerator >= np.uint32(i) * twice).astype(jnp.uint32)
    return base + moved - _IMPLICIT_BIT


def _round_to_fp8(x: jax.Array, e5m2: bool) -> jax.Array:
    """Rounds f32 to the bits of FP8, uint8, to nearest even, saturating; not for NaN.

    NOTE: astype will not do: XLA may round f32 to FP8 twice, through f16.
    """
    info = cast("np.finfo[Any]", jnp.finfo(fp8_dtype(e5m2)))
    size = lax.min(lax.abs(x), np.float32(info.max))
    # Below the smallest normal number a sum with `unit` drops what is less than the FP8 step.
    unit = np.float32(float(info.smallest_subnormal) * 2**23)
    subnormal = lax.bitcast_convert_type(size + unit, jnp.uint32) - unit.view(np.uint32)
    # Above, the mantissa is rounded in place. A carry goes into the exponent.
    shift = 23 - info.nmant
    bits = lax.bitcast_convert_type(size, jnp.uint32)
    bits += ((bits >> shift) & np.uint32(1)) + np.uint32(2 ** (shift - 1) - 1)
    bias = np.float32(info.smallest_normal).view(np.uint32) - np.uint32(1 << 23)
    normal = (bits - bias) >> shift
    is_normal = size >= np.float32(info.smallest_normal)
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> 24) & np.uint32(0x80)
    return (jnp.where(is_normal, normal, subnormal) | sign).astype(jnp.uint8)


def fp8_dtype(e5m2: bool) -> np.dtype:
    return jnp.dtype(jnp.float8_e5m2 if e5m2 else jnp.float8_e4m3fn)
