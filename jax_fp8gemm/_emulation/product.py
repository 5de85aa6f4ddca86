"""The products of _primitives with the bits of the CUDA kernels, in plain JAX.

promote() adds one k-block, as ffi/cuda/gemm/scales.cuh does. Sums are held as the bits of f32.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm._data import formats
from jax_fp8gemm._data.split_k import add_parts
from jax_fp8gemm._emulation import f32
from jax_fp8gemm._emulation.tensor_core import block_sums
from jax_fp8gemm._sharding.manual_axes import constant_like

_BLOCK = formats.SCALE_BLOCK
# Rows of a result that are computed at a time. What they take beside operands and result is a few
# arrays of this many rows.
_TILE = 128


def multiply(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
    *accum,
    is_1d1d: bool,
    is_2d1d: bool = False,
    out_dtype: Any,
    num_parts: int = 1,
):
    """gemm.reference with the bits of the kernel."""
    if is_2d1d:  # as the kernel: the transpose of the product of the exchanged operands
        accum = [x.T for x in accum]
        exchanged = rhs, rhs_scale, lhs, lhs_scale, *accum
        return [x.T for x in multiply(*exchanged, is_1d1d=False, out_dtype=out_dtype)]
    (m, k), n = lhs.shape, rhs.shape[0]
    if 0 in (m, n, k):
        return list(accum) or [jnp.zeros((m, n), out_dtype)]
    lhs, rhs = (
        _pad(x, columns=formats.num_blocks(k) * _BLOCK - x.shape[1])
        for x in lax.optimization_barrier((lhs, rhs))
    )
    scales = f32.to_bits(rhs_scale)

    def add_up(values, scale):
        def add_block(b, promoted):
            return promote(promoted, values, scale, rhs, scales, b, is_1d1d)

        zeros = constant_like(values, jnp.zeros((values.shape[0], n), jnp.uint32))
        add_part = lambda first, behind: lax.fori_loop(first, behind, add_block, zeros)
        return add_parts(add_part, f32.add, formats.num_blocks(k), num_parts)

    promoted = map_rows(add_up, lhs, f32.to_bits(lhs_scale))
    return [finish(promoted, accum, out_dtype)]


def map_rows(function: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """function(*operands), a tile of rows at a time. Its result (..., rows, n) has their rows."""
    m = operands[0].shape[0]
    tile = min(m, _TILE) if isinstance(m, int) else _TILE  # m may be symbolic
    rows = -(-m // tile) * tile - m
    tiles = [_pad(x, rows=rows).reshape(-1, tile, x.shape[1]) for x in operands]
    results = lax.map(lambda xs: function(*xs), tiles)
    results = jnp.moveaxis(results, 0, -3)  # (..., tiles, tile, n)
    return results.reshape(*results.shape[:-3], -1, results.shape[-1])[..., :m, :]


def promote(promoted, lhs, lhs_scale, rhs, rhs_scale, b, is_1d1d: bool) -> f32.Bits:
    """Adds the scaled products over k-block b to promoted (m, n). Scales are bits, in columns."""
    is_index: dict[str, Any] = dict(allow_negative_indices=False)
    block = lambda x: lax.dynamic_slice_in_dim(x, b * _BLOCK, _BLOCK, 1, **is_index)
    column = lambda scale: lax.dynamic_index_in_dim(scale, b, 1, keepdims=False, **is_index)
    sums = f32.to_bits(block_sums(block(lhs), block(rhs)))
    lhs_scales, rhs_scales = column(lhs_scale)[:, None], column(rhs_scale)[None]
    if is_1d1d:
        scaled = f32.fma(*_broadcast(lhs_scales, sums, np.uint32(0)))
        return f32.fma(*_broadcast(rhs_scales, scaled, promoted))
    scales = f32.mul(*_broadcast(lhs_scales, rhs_scales))
    scales = jnp.repeat(scales, _BLOCK, axis=1)[:, : rhs.shape[0]]
    return f32.fma(scales, sums, promoted)


def finish(promoted: f32.Bits, accum: Any, out_dtype: Any) -> jax.Array:
    """Returns the result: promoted, added to accum if there is one, in out_dtype."""
    for x in accum:
        promoted = f32.add(f32.to_bits(x), promoted)
    return f32.from_bits(promoted) if out_dtype == jnp.float32 else f32.to_bfloat16(promoted)


def _broadcast(*arrays: Any) -> tuple[jax.Array, ...]:
    return tuple(jnp.broadcast_arrays(*arrays))


def _pad(x: jax.Array, rows: int = 0, columns: int = 0) -> jax.Array:
    is_whole = isinstance(rows, int) and isinstance(columns, int) and not (rows or columns)
    return x if is_whole else jnp.pad(x, ((0, rows), (0, columns)))
