"""gemm_p: the primitive behind scaled_matmul, its rules and its kernel.

For lhs (m, k) and rhs (n, k), quantised:

    out[i, j] = the chain over k-blocks b ascending, from promoted = 0, of
        promoted = fma(lhs_scale[i, b] * rhs_scale[j / 128, b], lhs[i, b] . rhs[j, b], promoted)
        promoted = fma(rhs_scale[j, b], lhs_scale[i, b] * (lhs[i, b] . rhs[j, b]), promoted)

the former with 128x128 scale blocks on rhs (1d2d), the latter with 1x128 (1d1d); then rounded to
the result's dtype.
The reference computes the same sum without promising the last bits of the kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm import _checks, _ffi, _tile_config
from jax_fp8gemm._partition import Shards
from jax_fp8gemm._partition_rule import PartitionRule
from jax_fp8gemm._primitive import constant_like, define_primitive, map_batch

_BLOCK = _checks.SCALE_BLOCK


def _shape_rule(lhs, lhs_scale, rhs, rhs_scale, *accum, is_1d1d: bool, out_dtype):
    op = "gemm"
    if lhs.ndim == 3:
        operands = lhs, lhs_scale, rhs, rhs_scale, *accum
        elements = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in operands]
        (out,) = _shape_rule(*elements, is_1d1d=is_1d1d, out_dtype=out_dtype)
        return [jax.ShapeDtypeStruct((lhs.shape[0], *out.shape), out.dtype)]
    _checks.check_ndim(op, "lhs", lhs, 2, "(m, k)")
    _checks.check_ndim(op, "rhs", rhs, 2, "(n, k)")
    _checks.check_scaled(op, "lhs", lhs, lhs_scale, (1, _BLOCK))
    _checks.check_scaled(op, "rhs", rhs, rhs_scale, (1 if is_1d1d else _BLOCK, _BLOCK))
    _checks.check_same_k(op, lhs, lhs.shape[1], rhs, rhs.shape[1])
    shape = (lhs.shape[0], rhs.shape[0])
    for accum_aval in accum:
        _checks.check_accumulator(op, accum_aval, shape, out_dtype)
    return [jax.ShapeDtypeStruct(shape, out_dtype)]


def reference(lhs, lhs_scale, rhs, rhs_scale, *accum, is_1d1d: bool, out_dtype):
    """The product in plain JAX."""
    m, k = lhs.shape
    n = rhs.shape[0]
    if k == 0:
        return list(accum) or [jnp.zeros((m, n), out_dtype)]
    if not is_1d1d:
        rhs_scale = jnp.repeat(rhs_scale, _BLOCK, axis=0)[:n]
    # NOTE: XLA on GPU removes a rounding to FP8 that it can see being undone in the same program.
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    pad_k = lambda x: jnp.pad(x, ((0, 0), (0, -k % _BLOCK)))
    lhs, rhs = pad_k(lhs), pad_k(rhs)

    def promote(promoted, b):
        # FP8 products are exact in f32, and in the TF32 that XLA may use for an f32 dot.
        block = lambda x: lax.dynamic_slice_in_dim(x, b * _BLOCK, _BLOCK, 1).astype(jnp.float32)
        partial = lax.dot_general(block(lhs), block(rhs), (((1,), (1,)), ((), ())))
        column = lambda scale: lax.dynamic_index_in_dim(scale, b, 1, keepdims=False)
        return promoted + column(lhs_scale)[:, None] * column(rhs_scale)[None] * partial, None

    zeros = constant_like(lhs, jnp.zeros((m, n), jnp.float32))
    promoted, _ = lax.scan(promote, zeros, jnp.arange(_checks.num_blocks(k)))
    for x in accum:
        promoted = x + promoted
    return [promoted.astype(out_dtype)]


def _ffi_call(lhs, lhs_scale, rhs, rhs_scale, *accum, is_1d1d: bool, out_dtype):
    """The kernel, which needs k % 16 == 0 and n % 8 == 0: pads rhs and slices the result."""
    m, k = lhs.shape
    n = rhs.shape[0]
    if 0 in (m, n, k):
        return list(accum) or [jnp.zeros((m, n), out_dtype)]
    pad = lambda x, rows, columns, value=0: (
        jnp.pad(x, ((0, rows), (0, columns)), constant_values=value) if rows or columns else x
    )
    pad_k, pad_n = -k % 16, -n % 8
    lhs, rhs = pad(lhs, 0, pad_k), pad(rhs, pad_n, pad_k)
    if is_1d1d:
        rhs_scale = pad(rhs_scale, pad_n, 0, 1)
    # The 128x128 scales stay: n rounded up to 8 ends in the same block.
    accum = [pad(x, 0, pad_n) for x in accum]
    config = _config(lhs, rhs, is_1d1d, out_dtype, bool(accum))
    # 1x128 scales are (rows, blocks) with rows minor: the scales of one tile are then neighbours.
    row_major, column_major = (0, 1), (1, 0)
    rhs_scale_layout = column_major if is_1d1d else row_major
    layouts = [row_major, column_major, row_major, rhs_scale_layout, row_major]
    out = jax.ffi.ffi_call(
        _ffi.GEMM_TARGET,
        jax.ShapeDtypeStruct((m, n + pad_n), out_dtype),
        input_layouts=layouts[: 4 + len(accum)],
        output_layouts=row_major,
        input_output_aliases={4: 0} if accum else None,
    )(lhs, lhs_scale, rhs, rhs_scale, *accum, config=config)
    return [out[:, :n]]


def _config(lhs, rhs, is_1d1d: bool, out_dtype, accumulate: bool) -> dict[str, Any]:
    num_sms = _ffi.num_sms()
    spec = dict(is_1d1d=is_1d1d, out_f32=out_dtype == jnp.float32, accumulate=accumulate)
    (m, k), n = lhs.shape, rhs.shape[0]
    config = _tile_config.choose(m, n, k, num_sms=num_sms, **spec)
    is_e5m2 = lambda x: x.dtype == jnp.float8_e5m2
    return config.attributes(**spec, lhs_e5m2=is_e5m2(lhs), rhs_e5m2=is_e5m2(rhs), num_sms=num_sms)


def _each(run):
    """`run` for one product, or for a batch of them if all operands have one dimension more."""

    def run_each(*operands, **params):
        if operands[0].ndim == 2:
            return run(*operands, **params)
        return map_batch(partial(run, **params), operands, [0] * len(operands))

    return run_each


def _batch_rule(operands, dims, *, is_1d1d: bool, **params):
    """Folds a batched lhs into m, a batched rhs into n; a product for each element where both are.

    One by one where only accum is, and where a block of 128 columns would span two elements.
    """
    lhs_batched = any(d is not None for d in dims[:2])
    rhs_batched = any(d is not None for d in dims[2:4])
    front = lambda i, size: (
        jnp.broadcast_to(operands[i][None], (size, *operands[i].shape))
        if dims[i] is None
        else jnp.moveaxis(operands[i], dims[i], 0)
    )
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    params["is_1d1d"] = is_1d1d
    fold = lambda x: x.reshape(size * x.shape[1], *x.shape[2:])
    is_batch = operands[0].ndim - (dims[0] is not None) == 3
    if is_batch or (lhs_batched and rhs_batched):
        batches = [front(i, size) for i in range(len(operands))]
        if not is_batch:
            return gemm_p(*batches, **params), [0]
        (out,) = gemm_p(*map(fold, batches), **params)
        return [out.reshape(*batches[0].shape[:2], *out.shape[1:])], [0]
    n = operands[2].shape[1 if dims[2] == 0 else 0]
    if not (lhs_batched or rhs_batched) or (rhs_batched and not is_1d1d and n % _BLOCK):
        return map_batch(partial(gemm_p, **params), operands, dims), [0]
    operands_front = [front(i, size) for i in ((0, 1) if lhs_batched else (2, 3))]
    accum = [front(4, size)] if len(operands) == 5 else []
    if lhs_batched:
        m = operands_front[0].shape[1]
        lhs = map(fold, operands_front)
        (out,) = gemm_p(*lhs, *operands[2:4], *map(fold, accum), **params)
        return [out.reshape(size, m, n)], [0]
    values, scale = operands_front
    m = operands[0].shape[0]
    accum = [jnp.moveaxis(x, 0, 1).reshape(m, size * n) for x in accum]
    (out,) = gemm_p(*operands[:2], fold(values), fold(scale), *accum, **params)
    return [out.reshape(m, size, n)], [1]


def partition_rule(*operands, is_1d1d: bool, out_dtype) -> PartitionRule:
    blocks = {"k": _BLOCK} if is_1d1d else {"k": _BLOCK, "n": _BLOCK}
    batch = "b " if operands[0].ndim == 3 else ""
    *dims, out = (f"{batch}{x}" for x in ("m k", "m k", "n k", "n k", "m n", "m n"))
    return PartitionRule(tuple(dims[: len(operands)]), (out,), blocks, contracting=("k",))


def _run_shard(run, *operands, shards: Shards, is_1d1d: bool, out_dtype):
    """Sums over the mesh in f32, before anything is added or rounded."""
    if not shards.is_summed:
        return run(*operands, is_1d1d=is_1d1d, out_dtype=out_dtype)
    (part,) = run(*operands[:4], is_1d1d=is_1d1d, out_dtype=jnp.dtype(jnp.float32))
    total = shards.reduce(part)
    for x in operands[4:]:
        total = x + total
    return [total.astype(out_dtype)]


gemm_p = define_primitive(
    "jax_fp8gemm_gemm",
    shape_rule=_shape_rule,
    reference=_each(reference),
    ffi_call=_each(_ffi_call),
    batch_rule=_batch_rule,
    partition_rule=partition_rule,
    run_shard=_run_shard,
)
