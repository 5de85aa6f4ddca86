"""The numerics of quantisation in plain JAX.

Each block is quantised in f32. Every step is correctly rounded, so that CUDA, C++ on a CPU
(ffi/cpu/band.h), XLA and NumPy agree to the bit:

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
from jax_fp8gemm._data.division import INF_BITS, MANTISSA_MASK, NAN, divide_by_fmax, invert

_BLOCK = formats.SCALE_BLOCK
_SMALLEST_AMAX_BITS = np.uint32((127 - 92) << 23)
_NAN_VALUE = np.uint8(0x7F)
_FMAX_EXPONENT = {"float8_e4m3fn": 6, "float8_e5m2": 13}  # FMAX = 7 * 2^exponent


def quantize_blocks(x: jax.Array, block_m: int, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    """Quantises f32 (m, k) with one scale for each block_m x 128 block."""
    m, k = x.shape
    pad = -m % block_m, -k % _BLOCK
    padded = jnp.pad(x, ((0, pad[0]), (0, pad[1]))) if any(pad) else x
    mb, kb = padded.shape[0] // block_m, padded.shape[1] // _BLOCK
    blocks = padded.reshape(mb, block_m, kb, _BLOCK)
    # Keeps the scales from being computed again for every value.
    scale = lax.optimization_barrier(_scale_of(_amax_bits(blocks), e5m2, pow2_scale))
    scaled = blocks * invert(scale)[:, None, :, None]
    # Chosen among bytes: XLA on GPU may select FP8 through another type and change a NaN's payload.
    bits = lax.bitcast_convert_type(_round_to_fp8(scaled, e5m2), jnp.uint8)
    bits = jnp.where(scaled == scaled, bits, _NAN_VALUE)
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
    """Returns the bits (mb, kb) of amax of blocks (mb, block_m, kb, 128)."""
    # The bits of non-negative floats order as the floats do, with NaN above Inf.
    # NOTE: XLA on CPU takes the maximum over a dimension above 32 in two steps of one kernel each.
    mb, block_m, kb, _ = blocks.shape
    rows = (4, 32) if block_m == _BLOCK else (1, 1)
    sizes = lax.abs(blocks.reshape(mb, *rows, kb, 4, 32))
    bits = lax.bitcast_convert_type(sizes, jnp.uint32)
    return lax.reduce(bits, _SMALLEST_AMAX_BITS, lax.max, (1, 2, 4, 5))


def _scale_of(amax_bits: jax.Array, e5m2: bool, pow2_scale: bool) -> jax.Array:
    """Returns the scale, correctly rounded, from the bits of amax. That of a bad block is NaN."""
    amax = lax.bitcast_convert_type(amax_bits, jnp.float32)
    scale = divide_by_fmax(amax, _FMAX_EXPONENT[fp8_dtype(e5m2).name])
    if pow2_scale:
        bits = lax.bitcast_convert_type(scale, jnp.uint32)
        bits = (bits + MANTISSA_MASK) & ~MANTISSA_MASK
        scale = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(amax_bits < INF_BITS, scale, NAN)


def _round_to_fp8(x: jax.Array, e5m2: bool) -> jax.Array:
    """Rounds f32 to FP8, to nearest even; not for NaN, nor beyond FMAX.

    NOTE: astype alone will not do: XLA may round f32 to FP8 twice, through f16. After the rounding
    to the grid in f32 below, astype is exact.
    """
    info = _finfo(e5m2)
    step = np.float32(info.smallest_subnormal)
    subnormal = lax.round(x * (1 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    x = lax.select(lax.abs(x) < np.float32(info.smallest_normal), subnormal, normal)
    return x.astype(fp8_dtype(e5m2))


def _finfo(e5m2: bool) -> np.finfo[Any]:
    return cast("np.finfo[Any]", jnp.finfo(fp8_dtype(e5m2)))


def fp8_dtype(e5m2: bool) -> np.dtype:
    return jnp.dtype(jnp.float8_e5m2 if e5m2 else jnp.float8_e4m3fn)
