"""gemm_p: the product of two quantised matrices, both K-major.

For quantised lhs (m, k) and rhs (n, k), the kernel starts with promoted = 0 and takes the k-blocks
b, of 128 columns each, in ascending order. With 128x128 scale blocks on rhs (1d2d) a step is

    promoted = fma(lhs_scale[i, b] * rhs_scale[j / 128, b], lhs[i, b] . rhs[j, b], promoted)

and with 1x128 scale blocks on rhs (1d1d)

    promoted = fma(rhs_scale[j, b], lhs_scale[i, b] * (lhs[i, b] . rhs[j, b]), promoted)

With 128x128 scale blocks on lhs and 1x128 scale blocks on rhs (2d1d)

    promoted = fma(lhs_scale[i / 128, b] * rhs_scale[j, b], lhs[i, b] . rhs[j, b], promoted)

Element (i, j) of the result is promoted, rounded to the dtype of the result. The reference computes
the same sum, but its last bits may differ from the kernel's. The emulation has those bits. The
scaling is that of the DeepSeek-V3 report, section 3.3.2.

With split_k a 1d2d product of few rows is added up in parts (_data/split_k.py).

The k of lhs and that of rhs may differ within their last k-block, for rows may be padded with
zeros (_primitives/quantize.py).

lhs and the result may have several dimensions in the place of m; lhs and rhs may have several in
the place of k (gemm_dims.py). They are folded on the device, so that a mesh may cut each of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray, twin_of, values_and_scale
from jax_fp8gemm._data.split_k import add_parts
from jax_fp8gemm._emulation.product import multiply
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._primitives.gemm_dims import batch_rule, folded, matrix_shapes, num_batch_dims
from jax_fp8gemm._primitives.in_place import with_own_buffers
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.manual_axes import constant_like
from jax_fp8gemm._sharding.partition import Shards
from jax_fp8gemm._sharding.rule import PartitionRule
from jax_fp8gemm._tuning import choose
from jax_fp8gemm._tuning.tile import operand_formats

_BLOCK = formats.SCALE_BLOCK


@jax.named_scope("fp8gemm_gemm")
def gemm(
    lhs: ScaledArray,
    rhs: ScaledArray,
    out_dtype: Any,
    implementation: Implementation = None,
    accum: jax.Array | None = None,
    reduce_dtype: Any = jnp.float32,
    out_spec: PartitionSpec | None = None,
    split_k: bool = False,
) -> jax.Array:
    """Multiplies lhs (..., k) by the transpose of rhs (n, k): scaled_matmul without the checks.

    Args:
      lhs: block (1, 128), or (128, 128) with an rhs of (1, 128).
      rhs: block (128, 128) or (1, 128). All its dimensions after the first are k. If there are
        several, the last must consist of whole scale blocks. Where `transposed` is stored, a mesh
        that must move rhs moves that (_sharding/twins.py).
      out_dtype: bfloat16 or float32.
      accum: (..., n) f32 that the product is added to, or None.
      reduce_dtype: the dtype of the partial sums that devices add where a mesh cuts k.
      out_spec: how Explicit mesh axes cut the result. None: like lhs in m and rhs in n.
      split_k: whether a product may be added up in parts, where that is faster. With accum, or with
        1x128 blocks of rhs, it has no effect.
    Returns:
      (..., n) array of out_dtype.
    """
    is_1d2d = lhs.block == (1, _BLOCK) and rhs.block == (_BLOCK, _BLOCK)
    operands = [*values_and_scale(lhs), *values_and_scale(rhs)]
    operands += [] if accum is None else [accum]
    params: dict[str, Any] = dict(
        num_k_dims=rhs.ndim - 1,
        is_1d1d=lhs.block == rhs.block,
        is_2d1d=lhs.block == (_BLOCK, _BLOCK),
        out_dtype=jnp.dtype(out_dtype),
        reduce_dtype=jnp.dtype(reduce_dtype),
        split_k=split_k and is_1d2d and accum is None,
    )
    operands = [jnp.asarray(x) for x in operands]
    out_specs = None if out_spec is None else [out_spec]
    how: dict[str, Any] = dict(implementation=implementation, out_specs=out_specs)
    return gemm_p(*operands, twins=twins_of_rhs(rhs), **how, **params)[0]


def twins_of_rhs(rhs: ScaledArray) -> dict[int, jax.Array]:
    """Returns the twins of values and scale of rhs, the operands 2 and 3 of a product."""
    return dict(enumerate(map(jnp.asarray, twin_of(rhs) or ()), 2))


def _shape_rule(*operands, num_k_dims: int, is_1d1d: bool, is_2d1d: bool, out_dtype, split_k: bool):
    shapes = matrix_shapes(operands, num_k_dims)
    matrices = [
        jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, operands, strict=True)
    ]
    _check(*matrices, is_1d1d=is_1d1d, is_2d1d=is_2d1d, out_dtype=out_dtype)
    lhs, rhs = operands[0], operands[2]
    n = rhs.shape[num_batch_dims(rhs, num_k_dims)]
    return [jax.ShapeDtypeStruct((*lhs.shape[:-num_k_dims], n), out_dtype)]


def _check(lhs, lhs_scale, rhs, rhs_scale, *accum, is_1d1d: bool, is_2d1d: bool, out_dtype) -> None:
    op, shape = "gemm", (lhs.shape[0], rhs.shape[0])
    is_1d2d = not (is_1d1d or is_2d1d)
    checks.check_scaled(op, "lhs", lhs, lhs_scale, (_BLOCK if is_2d1d else 1, _BLOCK))
    checks.check_scaled(op, "rhs", rhs, rhs_scale, (_BLOCK if is_1d2d else 1, _BLOCK))
    if formats.num_blocks(lhs.shape[1]) != formats.num_blocks(rhs.shape[1]):
        checks.check_same_k(op, lhs, lhs.shape[1], rhs, rhs.shape[1])
    for accum_aval in accum:
        checks.check_accumulator(op, accum_aval, shape, out_dtype)


def reference(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
    *accum,
    is_1d1d: bool,
    is_2d1d: bool = False,
    out_dtype,
    num_parts: int = 1,
):
    """Multiplies matrices in plain JAX."""
    m, k = lhs.shape
    n = rhs.shape[0]
    if k == 0:
        return list(accum) or [jnp.zeros((m, n), out_dtype)]
    # NOTE: XLA on GPU removes a rounding to FP8 if the same program casts the values back.
    lhs, rhs = map(k_blocks, lax.optimization_barrier((lhs, rhs)))

    def promote(b_and_promoted):
        b, promoted = b_and_promoted
        return b + 1, promoted + block_product(lhs, lhs_scale, rhs, rhs_scale, b, is_1d1d)

    def add_up(first, behind):
        start = first, constant_like(lhs, jnp.zeros((m, n), jnp.float32))
        return lax.while_loop(lambda carry: carry[0] < behind, promote, start)[1]

    promoted = add_parts(add_up, jnp.add, lhs.shape[1], num_parts)
    for x in accum:
        promoted = x + promoted
    return [promoted.astype(out_dtype)]


def k_blocks(x: jax.Array) -> jax.Array:
    """Returns FP8 values (rows, k) as f32 (rows, k-blocks, 128), which are zero behind k.

    FP8 products are exact in f32, and in the TF32 that XLA may use for an f32 dot.
    """
    rows, k = x.shape
    num_blocks = formats.num_blocks(k)
    x = x.astype(jnp.float32)
    if not isinstance(k, int) or k % _BLOCK:
        # Not by -k % 128, which JAX cannot prove to fill a block if k is symbolic.
        x = jnp.pad(x, ((0, 0), (0, num_blocks * _BLOCK - k)))
    return x.reshape(rows, num_blocks, _BLOCK)


def block_product(lhs, lhs_scale, rhs, rhs_scale, b, is_1d1d: bool) -> jax.Array:
    """Returns the scaled product over k-block b, f32 (m, n), of operands that k_blocks made.

    A scale is that of a row or of 128 rows. Scales are applied in the order of the kernel, which
    is_1d1d chooses.
    """
    is_index: dict[str, Any] = dict(keepdims=False, allow_negative_indices=False)
    of_block = lambda x: lax.dynamic_index_in_dim(x, b, 1, **is_index)
    lhs, rhs = of_block(lhs), of_block(rhs)
    product = lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())))
    m, n = product.shape
    lhs_scale = _of_rows(of_block(lhs_scale), m)[:, None]
    rhs_scale = _of_rows(of_block(rhs_scale), n)[None]
    return rhs_scale * (lhs_scale * product) if is_1d1d else lhs_scale * rhs_scale * product


def _of_rows(scale: jax.Array, num_rows: int) -> jax.Array:
    """Returns the scale of each row, from those of rows or of blocks of 128 rows."""
    return scale if scale.shape[0] == num_rows else jnp.repeat(scale, _BLOCK)[:num_rows]


def ffi_call(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
    *accum,
    is_1d1d: bool,
    is_2d1d: bool = False,
    out_dtype,
    num_parts: int = 1,
):
    """Calls the kernel. It needs k % 16 == 0 and n % 8 == 0, so operands are padded with zeros.

    A 1d2d product has a result of more columns instead of an rhs of more rows. In the kernel
    128x128 scales belong to rhs. If they are those of lhs, the operands are exchanged, and the
    kernel stores the transpose of what it computes.
    """
    m, n = lhs.shape[0], rhs.shape[0]
    k = min(lhs.shape[1], rhs.shape[1])
    if 0 in (m, n, k):
        return list(accum) or [jnp.zeros((m, n), out_dtype)]
    pad = lambda x, rows, columns, value=0: (
        jnp.pad(x, ((0, rows), (0, columns)), constant_values=value) if rows or columns else x
    )
    pad_n = -n % 8
    lhs, rhs = (pad(x, 0, -x.shape[1] % 16) for x in (lhs, rhs))
    if is_1d1d or is_2d1d:
        rhs, rhs_scale = pad(rhs, pad_n, 0), pad(rhs_scale, pad_n, 0, 1)
    accum = with_own_buffers([pad(x, 0, pad_n) for x in accum])
    num_sms = max(extension.num_sms(), num_parts)
    spec = dict(
        is_1d1d=is_1d1d,
        transpose_out=is_2d1d,
        out_f32=out_dtype == jnp.float32,
        accumulate=bool(accum),
    )
    extents = m, n + pad_n
    if is_2d1d:
        extents = extents[::-1]
        lhs, lhs_scale, rhs, rhs_scale = rhs, rhs_scale, lhs, lhs_scale
    config = choose.choose(
        *extents, k + -k % 16, num_sms=num_sms, num_parts=num_parts, **spec
    ).attributes(**spec, **operand_formats(lhs, rhs), num_sms=num_sms)
    # 1x128 scales are (rows, blocks) with rows minor. The scales of a tile are then neighbours.
    row_major, column_major = (0, 1), (1, 0)
    rhs_scale_layout = column_major if is_1d1d else row_major
    layouts = [row_major, column_major, row_major, rhs_scale_layout, row_major]
    out = jax.ffi.ffi_call(
        extension.GEMM_TARGET,
        jax.ShapeDtypeStruct((m, n + pad_n), out_dtype),
        input_layouts=layouts[: 4 + len(accum)],
        output_layouts=row_major,
        input_output_aliases={4: 0} if accum else None,
    )(lhs, lhs_scale, rhs, rhs_scale, *accum, config=config)
    return [out[:, :n]]


def _batch_rule(operands, dims, **params):
    return batch_rule(gemm_p, operands, dims, **params)


def _partition_rule(
    *operands, num_k_dims: int, is_1d1d: bool, is_2d1d: bool, out_dtype, split_k: bool
) -> PartitionRule:
    lhs, rhs = operands[0], operands[2]
    num_batch = num_batch_dims(rhs, num_k_dims)
    several = lambda name, count: "".join(f"{name}{i} " for i in range(count))
    batch = several("b", num_batch)
    m = several("m", lhs.ndim - num_batch - num_k_dims - 1) + "m"
    k = several("k", num_k_dims - 1) + "k"
    lhs_dims, rhs_dims, out_dims = f"{batch}{m} {k}", f"{batch}n {k}", f"{batch}{m} n"
    dims = lhs_dims, lhs_dims, rhs_dims, rhs_dims, out_dims
    square = {} if is_1d1d else {"m" if is_2d1d else "n": _BLOCK}
    blocks = {"k": _BLOCK, **square}
    uncut = () if lhs.shape[-1] == rhs.shape[-1] else ("k",)
    contracting = tuple(k.split())
    return PartitionRule(dims[: len(operands)], (out_dims,), blocks, contracting, uncut)


def _run_shard(run, *operands, shards: Shards, out_dtype, reduce_dtype, **params):
    """Adds the devices' products in reduce_dtype, then adds accum, then rounds."""
    if not shards.is_summed:
        return run(*operands, out_dtype=out_dtype, **params)
    (part,) = run(*operands[:4], out_dtype=reduce_dtype, **params)
    total = shards.reduce(part)
    for x in operands[4:]:
        total = x + total
    return [total.astype(out_dtype)]


def _has_one_reader(
    lhs, lhs_scale, rhs, rhs_scale, *accum, is_1d1d: bool, is_2d1d: bool, **params: Any
) -> bool:
    return (is_1d1d or is_2d1d) and not accum


gemm_p = define_primitive(
    "jax_fp8gemm_gemm",
    _shape_rule,
    Forms(folded(reference), folded(ffi_call), folded(multiply), _has_one_reader),
    batch_rule=_batch_rule,
    mesh_rules=MeshRules(_partition_rule, _run_shard, ("reduce_dtype",)),
)
