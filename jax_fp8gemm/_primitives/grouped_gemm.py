"""grouped_gemm_p: multiplies each group of rows by its own matrix, all quantised and K-major.

For lhs (m, k) and rhs (g, n, k), with rows(i) the rows of group i:

    out[rows(i)] = lhs[rows(i)] . rhs[i]^T

Each product is that of gemm.py, 1d2d, and has the bits of scaled_matmul of that group alone.
_data/groups.py says which rows a group has. In the masked form lhs is (g, max_m, k), and group i is
the first group_sizes[i] rows of lhs[i].
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks, formats, groups
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._emulation import f32, product
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._primitives.gemm import reference, twins_of_rhs
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.manual_axes import constant_like
from jax_fp8gemm._sharding.partition import Shards
from jax_fp8gemm._sharding.rule import PartitionRule
from jax_fp8gemm._tuning import choose, masked_rows, tile_config
from jax_fp8gemm._tuning.tile import operand_formats

UnusedRows = Literal["zero", "undefined"]

_BLOCK = formats.SCALE_BLOCK


@jax.named_scope("fp8gemm_grouped_gemm")
def grouped_gemm(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: jax.Array,
    first_row: jax.Array,
    out_dtype: Any,
    implementation: Implementation = None,
    reduce_dtype: Any = jnp.float32,
    out_spec: PartitionSpec | None = None,
    unused_rows: UnusedRows = "zero",
    expected_rows: int | None = None,
    spare_sms: int = 0,
) -> jax.Array:
    """Multiplies groups of rows by their matrices: scaled_ragged_dot without the checks.

    Args:
      lhs: (m, k) or (g, max_m, k), block (1, 128).
      rhs: (g, n, k), block (128, 128). Where `transposed` is stored, a mesh that must move rhs
        moves that (_sharding/twins.py).
      group_sizes: (g,) integers.
      first_row: (1,) int32, the row at which the first group starts.
      out_dtype: bfloat16 or float32.
      reduce_dtype: the dtype of the partial sums that devices add where a mesh cuts k or g.
      out_spec: how Explicit mesh axes cut the result. None: like lhs in m and rhs in n.
      unused_rows: what the rows of no group hold: zeros, or anything, for which nothing is written.
        A caller of the latter selects the rows that it reads. It never multiplies others by zero,
        because they may hold NaN.
      expected_rows: of the masked form, the rows of a group that tiles are chosen for. None: max_m.
      spare_sms: the number of multiprocessors that the kernel leaves to a collective beside it. No
        bit depends on it.
    Returns:
      (m, n) or (g, max_m, n) array of out_dtype.
    """
    sizes = groups.sizes_as_int32(group_sizes)
    operands = (*values_and_scale(lhs), *values_and_scale(rhs), sizes, first_row)
    operands = [jnp.asarray(x) for x in operands]
    dtypes = dict(out_dtype=jnp.dtype(out_dtype), reduce_dtype=jnp.dtype(reduce_dtype))
    rows = dict(unused_rows=unused_rows, expected_rows=expected_rows)
    params = dict(**dtypes, **rows, spare_sms=spare_sms)
    out_specs = None if out_spec is None else [out_spec]
    how: dict[str, Any] = dict(implementation=implementation, out_specs=out_specs)
    return grouped_gemm_p(*operands, twins=twins_of_rhs(rhs), **how, **params)[0]


def shape_rule(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
    group_sizes,
    first_row,
    *,
    out_dtype,
    unused_rows,
    expected_rows,
    spare_sms,
):
    op = "grouped_gemm"
    checks.check_ndim(op, "rhs", rhs, 3, "(g, n, k)")
    checks.check_scaled(op, "lhs", lhs, lhs_scale, (1, _BLOCK))
    checks.check_scaled(op, "rhs", rhs, rhs_scale, (_BLOCK, _BLOCK))
    checks.check_same_k(op, lhs, lhs.shape[-1], rhs, rhs.shape[2])
    groups.check_group_sizes(op, group_sizes, rhs.shape[0])
    return [jax.ShapeDtypeStruct((*lhs.shape[:-1], rhs.shape[1]), out_dtype)]


def _reference(*operands, out_dtype, unused_rows, expected_rows, spare_sms):
    return _tile_by_tile(reference, *operands, out_dtype=out_dtype)


def _tile_by_tile(multiply, lhs, lhs_scale, rhs, rhs_scale, group_sizes, first_row, *, out_dtype):
    """Multiplies 128 rows at a time, by `multiply`: the reference of gemm.py, or its emulation.

    Rows of no group are zero.
    """
    if lhs.ndim == 3:
        one = lambda xs: _tile_by_tile(multiply, *xs, first_row=first_row, out_dtype=out_dtype)[0]
        groups_first = (lhs, lhs_scale, rhs[:, None], rhs_scale[:, None], group_sizes[:, None])
        return [lax.map(one, groups_first)]
    m, n = lhs.shape[0], rhs.shape[1]
    starts, ends = groups.row_ranges(group_sizes, first_row, m)
    tiles = (ends - starts + _BLOCK - 1) // _BLOCK
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    first_rows = starts - (tile_ends - tiles) * _BLOCK  # where tile 0 would be, were it the group's
    is_index: dict[str, Any] = dict(allow_negative_indices=False)
    # A tile may end behind the last row.
    lhs, lhs_scale = (jnp.pad(x, ((0, _BLOCK), (0, 0))) for x in (lhs, lhs_scale))

    def multiply_tile(tile, out):
        # Rows of the next group, and what a NaN among them makes, are not kept.
        (i,) = groups.count_up_to(tile_ends, tile[None])
        of_group = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False, **is_index)
        row = of_group(first_rows) + tile * _BLOCK
        of_tile = lambda x: lax.dynamic_slice_in_dim(x, row, _BLOCK, **is_index)
        operands = of_tile(lhs), of_tile(lhs_scale), of_group(rhs), of_group(rhs_scale)
        (result,) = multiply(*operands, is_1d1d=False, out_dtype=jnp.dtype(jnp.float32))
        is_own = row + jnp.arange(_BLOCK, dtype=jnp.int32) < of_group(ends)
        kept = jnp.where(is_own[:, None], result, of_tile(out))
        return lax.dynamic_update_slice_in_dim(out, kept, row, 0, **is_index)

    out = constant_like(lhs, jnp.zeros((m + _BLOCK, n), jnp.float32))
    out = lax.fori_loop(jnp.int32(0), jnp.sum(tiles, dtype=jnp.int32), multiply_tile, out)
    return [out[:m].astype(out_dtype)]


def _emulation(*operands, out_dtype, unused_rows, expected_rows, spare_sms):
    (out,) = _tile_by_tile(product.multiply, *operands, out_dtype=jnp.dtype(jnp.float32))
    return [product.finish(f32.to_bits(out), [], out_dtype)]


def _ffi_call(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
    group_sizes,
    first_row,
    *,
    out_dtype,
    unused_rows,
    expected_rows,
    spare_sms,
):
    """Calls the kernel. It needs k % 16 == 0 and n % 8 == 0, so operands are padded with zeros."""
    (*batch, k), (g, n, _) = lhs.shape, rhs.shape
    if not all(isinstance(extent, int) for extent in (g, *batch[1:])):
        raise ValueError(
            "grouped_gemm: g and, of lhs (g, max_m, k), max_m must be numbers in a program for "
            f"GPUs; got lhs {checks.short_type(lhs)}, rhs {checks.short_type(rhs)}. Rows that "
            "follow each other, lhs (m, k), may be any number."
        )
    if 0 in (*batch, n, k):
        return [jnp.zeros((*batch, n), out_dtype)]
    pad_k, pad_n = -k % 16, -n % 8
    pad = lambda x, *ends: jnp.pad(x, [(0, end) for end in ends]) if any(ends) else x
    m = math.prod(batch)
    lhs, lhs_scale = (x.reshape(m, x.shape[-1]) for x in (lhs, lhs_scale))
    lhs, rhs = pad(lhs, 0, pad_k), pad(rhs, 0, pad_n, pad_k)
    rhs, rhs_scale = (x.reshape(-1, x.shape[-1]) for x in (rhs, rhs_scale))
    spec = dict(is_1d1d=False, out_f32=out_dtype == jnp.float32, accumulate=False)
    num_sms = max(2, extension.num_sms() - spare_sms)
    expected = masked_rows.rows_of_tiles(*batch, expected_rows=expected_rows)
    config = choose.choose(expected, n, k, g, **spec, num_sms=num_sms).attributes(
        **spec,
        **operand_formats(lhs, rhs),
        num_sms=num_sms,
        grouping=tile_config.GROUPED_ROWS,
    )
    clears = masked_rows.LEFT
    if unused_rows == "zero":
        clears = masked_rows.how_to_clear(*batch, expected_rows=expected_rows)
    # 1x128 scales are (rows, blocks) with rows minor. The scales of a tile are then neighbours.
    row_major, column_major, vector = (0, 1), (1, 0), (0,)
    out, _ = jax.ffi.ffi_call(
        extension.GROUPED_GEMM_TARGET,
        (
            jax.ShapeDtypeStruct((m, n + pad_n), out_dtype),
            jax.ShapeDtypeStruct((1,), jnp.int32),  # the kernel counts tiles in it
        ),
        input_layouts=[row_major, column_major, row_major, row_major, vector, vector],
        output_layouts=[row_major, vector],
    )(
        *(lhs, lhs_scale, rhs, rhs_scale),
        group_sizes.astype(jnp.int32),
        first_row,
        config=config,
        rows_per_group=np.int32(batch[1] if len(batch) == 2 else 0),
        clears_unused=np.int32(clears),
    )
    return [out[:, :n].reshape(*batch, n)]


def _partition_rule(lhs, *_, out_dtype, unused_rows, expected_rows, spare_sms) -> PartitionRule:
    blocks = {"k": _BLOCK, "n": _BLOCK}
    if lhs.ndim == 3:
        dims = ("g t k", "g t k", "g n k", "g n k", "g", "first")
        return PartitionRule(dims, ("g t n",), blocks, ("k",), uncut=("first",))
    # A row is in one group. A device without the matrix of that group has zeros for the row, so the
    # sum over the devices has one term that is not zero. So _run_shard asks for zeros there.
    dims = ("t k", "t k", "g n k", "g n k", "sizes", "first")
    return PartitionRule(dims, ("t n",), blocks, ("k", "g"), uncut=("sizes", "first"))


def _run_shard(
    run, *operands, shards: Shards, out_dtype, reduce_dtype, unused_rows, expected_rows, spare_sms
):
    """Multiplies the rows of a device by the matrices on it, and skips rows of other groups."""
    *matrices, group_sizes, first_row = operands
    m, g = operands[0].shape[-2], operands[2].shape[0]
    row = shards.index("t") * m
    if operands[0].ndim == 3:
        sizes = jnp.clip(group_sizes - row, 0, m)
    else:
        ranges = groups.row_ranges(group_sizes, first_row, shards.count("t") * m)
        own = lambda x: lax.dynamic_slice_in_dim(x, shards.index("g") * g, g)
        starts, ends = (jnp.clip(own(x) - row, 0, m) for x in ranges)
        sizes, first_row = ends - starts, starts[:1]
        if shards.count("g") > 1:  # rows of other devices' groups are added
            unused_rows = "zero"
    dtype = reduce_dtype if shards.is_summed else out_dtype
    rows = dict(unused_rows=unused_rows, expected_rows=expected_rows)
    (out,) = run(*matrices, sizes, first_row, out_dtype=dtype, spare_sms=spare_sms, **rows)
    return [shards.reduce(out).astype(out_dtype)]


grouped_gemm_p = define_primitive(
    "jax_fp8gemm_grouped_gemm",
    shape_rule,
    Forms(_reference, _ffi_call, _emulation),
    mesh_rules=MeshRules(_partition_rule, _run_shard, ("reduce_dtype",)),
)
