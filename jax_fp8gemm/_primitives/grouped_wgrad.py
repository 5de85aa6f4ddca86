"""grouped_wgrad_p: contracts the tokens of each group, quantised along them: a weight gradient.

For lhs (m, t) and rhs (n, t), with columns(i) the columns that hold the tokens of group i:

    out[i] = lhs[:, columns(i)] . rhs[:, columns(i)]^T

Each product is that of gemm.py, 1d1d or 2d1d, and has the bits of the product of that group alone.
_data/groups.py says where the columns of a group are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks, formats, groups
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._emulation import f32, product
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._primitives.gemm import block_product, k_blocks
from jax_fp8gemm._primitives.in_place import with_own_buffers
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.manual_axes import constant_like
from jax_fp8gemm._sharding.partition import Shards
from jax_fp8gemm._sharding.rule import PartitionRule
from jax_fp8gemm._tuning import choose, tile_config
from jax_fp8gemm._tuning.tile import operand_formats

_BLOCK = formats.SCALE_BLOCK


@jax.named_scope("fp8gemm_grouped_wgrad")
def grouped_wgrad(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: jax.Array,
    out_dtype: Any,
    implementation: Implementation = None,
    accum: jax.Array | None = None,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """Contracts the tokens of each group: scaled_ragged_wgrad without the checks.

    Args:
      lhs: (m, t) and rhs: (n, t), block (1, 128), quantised by quantize_ragged. lhs may have block
        (128, 128).
      group_sizes: (g,) integers.
      out_dtype: bfloat16 or float32.
      accum: (g, m, n) f32 that the product is added to, or None.
      out_spec: how Explicit mesh axes cut the result. None: like lhs in m and rhs in n.
    Returns:
      (g, m, n) array of out_dtype; zero, or accum, for an empty group.
    """
    operands = [*values_and_scale(lhs), *values_and_scale(rhs), groups.sizes_as_int32(group_sizes)]
    operands += [] if accum is None else [accum]
    operands = [jnp.asarray(x) for x in operands]
    is_2d1d = lhs.block == (_BLOCK, _BLOCK)
    params: dict[str, Any] = dict(is_2d1d=is_2d1d, out_dtype=jnp.dtype(out_dtype))
    out_specs = None if out_spec is None else [out_spec]
    how: dict[str, Any] = dict(implementation=implementation, out_specs=out_specs)
    return grouped_wgrad_p(*operands, **how, **params)[0]


def check_tokens(op: str, lhs: Any, rhs: Any) -> None:
    """Raises ValueError unless lhs and rhs share t, a multiple of 128."""
    checks.check_same_k(op, lhs, lhs.shape[1], rhs, rhs.shape[1])
    if lhs.shape[1] % _BLOCK:
        raise ValueError(
            f"{op}: t must be a multiple of 128; got lhs {checks.short_type(lhs)}. "
            "Quantise with quantize_ragged, which fills up the last block of each group."
        )


def _shape_rule(lhs, lhs_scale, rhs, rhs_scale, group_sizes, *accum, is_2d1d: bool, out_dtype):
    op = "grouped_wgrad"
    for name, x, scale in (("lhs", lhs, lhs_scale), ("rhs", rhs, rhs_scale)):
        checks.check_ndim(op, name, x, 2, f"({'m' if name == 'lhs' else 'n'}, t)")
        is_square = is_2d1d and name == "lhs"
        checks.check_scaled(op, name, x, scale, (_BLOCK if is_square else 1, _BLOCK))
    check_tokens(op, lhs, rhs)
    groups.check_group_sizes(op, group_sizes)
    shape = (group_sizes.shape[0], lhs.shape[0], rhs.shape[0])
    for accum_aval in accum:
        checks.check_accumulator(op, accum_aval, shape, out_dtype)
    return [jax.ShapeDtypeStruct(shape, out_dtype)]


def _reference(lhs, lhs_scale, rhs, rhs_scale, group_sizes, *accum, is_2d1d: bool, out_dtype):
    (m, t), n, (g,) = lhs.shape, rhs.shape[0], group_sizes.shape
    num_blocks = t // _BLOCK
    group = _group_of_blocks(group_sizes, num_blocks)
    lhs, rhs = map(k_blocks, lax.optimization_barrier((lhs, rhs)))

    def promote(promoted, b):
        scaled = block_product(lhs, lhs_scale, rhs, rhs_scale, b, not is_2d1d)
        # mode="drop", for blocks behind the last group have index g.
        return promoted.at[group[b]].add(scaled, mode="drop"), None

    promoted = constant_like(lhs, jnp.zeros((g, m, n), jnp.float32))
    if num_blocks > 0:
        promoted, _ = lax.scan(promote, promoted, jnp.arange(num_blocks, dtype=jnp.int32))
    for x in accum:
        promoted = x + promoted
    return [promoted.astype(out_dtype)]


def _group_of_blocks(group_sizes: jax.Array, num_blocks: int) -> jax.Array:
    """Returns the group of each k-block, or g behind the last group."""
    t = num_blocks * _BLOCK
    blocks = jnp.clip((jnp.clip(group_sizes, 0, t) + _BLOCK - 1) // _BLOCK, 0, num_blocks)
    ends = jnp.minimum(jnp.cumsum(blocks), num_blocks)
    return groups.count_up_to(ends, jnp.arange(num_blocks, dtype=jnp.int32))


def _emulation(lhs, lhs_scale, rhs, rhs_scale, group_sizes, *accum, is_2d1d: bool, out_dtype):
    (m, t), n, (g,) = lhs.shape, rhs.shape[0], group_sizes.shape
    if 0 in (m, n, t):
        return list(accum) or [jnp.zeros((g, m, n), out_dtype)]
    if is_2d1d:  # as the kernel: the transpose of the product of the exchanged operands
        lhs, lhs_scale, rhs, rhs_scale, n = rhs, rhs_scale, lhs, lhs_scale, m
    num_blocks = t // _BLOCK
    group = _group_of_blocks(group_sizes, num_blocks)
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    rhs_scale = f32.to_bits(rhs_scale)

    def add_up(values, scale):
        def add_block(promoted, b):
            former = lax.dynamic_index_in_dim(promoted, group[b], keepdims=False)
            added = product.promote(former, values, scale, rhs, rhs_scale, b, not is_2d1d)
            return lax.dynamic_update_index_in_dim(promoted, added, group[b], 0), None

        # Blocks behind the last group are added to one more.
        zeros = constant_like(values, jnp.zeros((g + 1, values.shape[0], n), jnp.uint32))
        return lax.scan(add_block, zeros, jnp.arange(num_blocks, dtype=jnp.int32))[0][:g]

    promoted = product.map_rows(add_up, lhs, f32.to_bits(lhs_scale))
    promoted = promoted.mT if is_2d1d else promoted
    return [product.finish(promoted, accum, out_dtype)]


def _ffi_call(lhs, lhs_scale, rhs, rhs_scale, group_sizes, *accum, is_2d1d: bool, out_dtype):
    """Calls the kernel. It needs n % 8 == 0, so rhs is padded with zeros.

    With 128x128 scales of lhs the operands are exchanged, as in gemm.py.
    """
    (m, t), n, (g,) = lhs.shape, rhs.shape[0], group_sizes.shape
    if 0 in (m, n, t):
        return list(accum) or [jnp.zeros((g, m, n), out_dtype)]
    pad_n = -n % 8
    if pad_n:
        rhs = jnp.pad(rhs, ((0, pad_n), (0, 0)))
        rhs_scale = jnp.pad(rhs_scale, ((0, pad_n), (0, 0)), constant_values=1)
        accum = [jnp.pad(x, ((0, 0), (0, 0), (0, pad_n))) for x in accum]
    accum = with_own_buffers([x.reshape(g * m, n + pad_n) for x in accum])
    spec = dict(
        is_1d1d=not is_2d1d,
        transpose_out=is_2d1d,
        out_f32=out_dtype == jnp.float32,
        accumulate=bool(accum),
    )
    extents = (n + pad_n, m) if is_2d1d else (m, n + pad_n)
    if is_2d1d:
        lhs, lhs_scale, rhs, rhs_scale = rhs, rhs_scale, lhs, lhs_scale
    num_sms = extension.num_sms()
    config = choose.choose(*extents, t, g, **spec, num_sms=num_sms).attributes(
        **spec,
        **operand_formats(lhs, rhs),
        num_sms=num_sms,
        grouping=tile_config.GROUPED_CONTRACTION,
    )
    row_major, column_major, vector = (0, 1), (1, 0), (0,)
    rhs_scale_layout = row_major if is_2d1d else column_major
    layouts = [row_major, column_major, row_major, rhs_scale_layout, vector, row_major]
    out = jax.ffi.ffi_call(
        extension.GROUPED_WGRAD_TARGET,
        jax.ShapeDtypeStruct((g * m, n + pad_n), out_dtype),
        input_layouts=layouts[: 5 + len(accum)],
        output_layouts=row_major,
        input_output_aliases={5: 0} if accum else None,
    )(lhs, lhs_scale, rhs, rhs_scale, group_sizes.astype(jnp.int32), *accum, config=config)
    return [out[:, :n].reshape(g, m, n)]


def _partition_rule(*operands, is_2d1d: bool, out_dtype) -> PartitionRule:
    # The column of a token depends on the sizes of all groups, so every device needs all sizes.
    dims = ("m t", "m t", "n t", "n t", "sizes", "g m n")[: len(operands)]
    blocks = {"m": _BLOCK} if is_2d1d else {}
    return PartitionRule(dims, ("g m n",), blocks, contracting=("t",), uncut=("t", "sizes"))


def _run_shard(run, *operands, shards: Shards, **params):
    """Contracts the columns of the groups of a device, after moving them to the front."""
    if shards.count("g") == 1:
        return run(*operands, **params)
    *columns, group_sizes = operands[:5]
    t, g = columns[0].shape[1], group_sizes.shape[0] // shards.count("g")
    first_group = shards.index("g") * g
    sizes = jnp.clip(group_sizes, 0, t)
    first_block = groups.column_starts(jnp.zeros_like(sizes), sizes)[first_group] // _BLOCK

    def from_first(x):
        start = first_block * (x.shape[1] * _BLOCK // t)
        return lax.dynamic_slice_in_dim(jnp.pad(x, ((0, 0), (0, x.shape[1]))), start, x.shape[1], 1)

    sizes = lax.dynamic_slice_in_dim(sizes, first_group, g)
    return run(*map(from_first, columns), sizes, *operands[5:], **params)


def _has_one_reader(lhs, lhs_scale, rhs, rhs_scale, group_sizes, *accum, **params: Any) -> bool:
    return not accum


grouped_wgrad_p = define_primitive(
    "jax_fp8gemm_grouped_wgrad",
    _shape_rule,
    Forms(_reference, _ffi_call, _emulation, _has_one_reader),
    mesh_rules=MeshRules(_partition_rule, _run_shard),
)
