"""quantize_ragged_p: quantises along the tokens of each group, for a contraction over them.

For x (m, k), with rows(i) the rows of group i, its tokens, and columns(i) their columns:

    out[:, columns(i)] = x[rows(i)]^T, quantised with 1x128 blocks along the tokens

Values and scales are those of quantize(axis=-2) for each group alone. _data/groups.py says where
the columns of a group are. Mode "column" returns this, mode "row" x quantised along k, and mode
"row_column" both. With "block_transposed" and "row_block_transposed" in their places the columns
have 128x128 blocks: 128 features of 128 tokens, which start at the first token of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.rounding import block_types
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs, bind_in_mode, keep_used_axes
from jax_fp8gemm._primitives.quantize_blocks import quantize_blocks
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.partition import Shards
from jax_fp8gemm._sharding.rule import PartitionRule
from jax_fp8gemm._tuning import quantize_config


def ragged_columns(
    x: jax.Array, group_sizes: jax.Array, first_row: jax.Array, **args: Unpack[QuantizeArgs]
) -> ScaledArray:
    """Quantises x (m, k) along the tokens of each group: quantize_ragged without the checks.

    first_row: (1,) int32, the row at which the first group starts.
    """
    return _quantize(x, group_sizes, first_row, "column", args)[0]


def rows_and_ragged_columns(
    x: jax.Array,
    group_sizes: jax.Array,
    first_row: jax.Array,
    column_block: tuple[int, int] = (1, formats.SCALE_BLOCK),
    **args: Unpack[QuantizeArgs],
) -> tuple[ScaledArray, ScaledArray]:
    """Returns quantize(x) and quantize_ragged(x, group_sizes), by one read of x.

    column_block: the scale block of the latter, (1, 128) or (128, 128).
    """
    mode = modes.of_columns(column_block, with_rows=True)
    rows, columns = _quantize(x, group_sizes, first_row, mode, args)
    return rows, columns


@jax.named_scope("fp8gemm_quantize_ragged")
def _quantize(
    x: jax.Array, group_sizes: jax.Array, first_row: jax.Array, mode: str, args: QuantizeArgs
) -> tuple[ScaledArray, ...]:
    operands = jnp.asarray(x), _groups.sizes_as_int32(group_sizes), first_row
    return bind_in_mode(quantize_ragged_p, operands, mode, args)


def check_operands(op: str, x: Any, group_sizes: Any) -> None:
    """Raises unless x is (m, k) of a float dtype, and group_sizes fits it."""
    checks.check_dtype(op, "x", x, formats.FLOAT_DTYPES)
    checks.check_ndim(op, "x", x, 2, "(m, k)", hint="Map leading dimensions with jax.vmap.")
    _groups.check_group_sizes(op, group_sizes)
    _groups.check_rows(op, x, x.shape[0], group_sizes)


def _shape_rule(x, group_sizes, first_row, *, mode: str, e5m2: bool, pow2_scale: bool):
    check_operands("quantize_ragged", x, group_sizes)
    m, k = x.shape
    return result_types(m, k, group_sizes.shape[0], mode, e5m2)


def result_types(
    m: int, k: int, num_groups: int | None, mode: str, e5m2: bool
) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of (m, k) quantised along k, along the tokens of each group, or both.

    num_groups: the number of groups. With None every row of (m, k) is a token of one group.
    """
    rows, columns = modes.split(mode)
    block_m = formats.SCALE_BLOCK if modes.has_square_columns(mode) else 1
    t = num_columns_of_all(m) if num_groups is None else _groups.ragged_extent(m, num_groups)
    return [
        *(block_types(m, k, 1, e5m2) if rows else ()),
        *(block_types(k, t, block_m, e5m2) if columns else ()),
    ]


def num_columns_of_all(m: int) -> int:
    """Returns the columns of m rows that are all tokens: m in whole scale blocks.

    A symbolic m has no more than m, for JAX could not prove that operands of a product fit.
    """
    return _groups.ragged_extent(m, 1) if isinstance(m, int) else m


def reference(x, *of_groups, mode: str, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    """Quantises x (m, k) along k, along the tokens of each group, or both, in plain JAX.

    of_groups: group_sizes and first_row, or nothing where all rows are tokens.
    """
    how = e5m2, pow2_scale
    has_rows, has_columns = modes.split(mode)
    rows = quantize_blocks(x, 1, *how) if has_rows else []
    if not has_columns:
        return rows
    if of_groups:
        tokens = tokens_of_columns(x, *of_groups)
    else:
        m = x.shape[0]
        tokens = jnp.pad(x, ((0, num_columns_of_all(m) - m), (0, 0)))
    block_m = formats.SCALE_BLOCK if modes.has_square_columns(mode) else 1
    return [*rows, *quantize_blocks(tokens, block_m, *how, is_transposed=True)]


def tokens_of_columns(x: jax.Array, group_sizes: jax.Array, first_row: jax.Array) -> jax.Array:
    """Returns (t, k), the rows of x (m, k) that the ragged columns are; other rows are zero."""
    source = _groups.rows_of_columns(group_sizes, first_row, x.shape[0])
    x_and_zeros = jnp.pad(x, ((0, 1), (0, 0)))  # row m holds zeros
    return x_and_zeros[source]


def _ffi_call(x, group_sizes, first_row, *, mode: str, e5m2: bool, pow2_scale: bool):
    params: dict[str, Any] = dict(mode=mode, e5m2=e5m2, pow2_scale=pow2_scale)
    results = _shape_rule(x, group_sizes, first_row, **params)
    if x.size == 0:
        return reference(x, group_sizes, first_row, **params)
    groups = (group_sizes, first_row)
    return call_kernel(extension.QUANTIZE_TARGET, "plain", [x], groups, results, **params)


def call_kernel(
    target: str,
    source: str,
    arrays: Sequence[jax.Array],
    groups: tuple[jax.Array, jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    mode: str,
    e5m2: bool,
    pow2_scale: bool,
    num_scales: int = 0,
    has_ragged_rows: bool = False,
    activation: Activation = "silu",
) -> list[jax.Array]:
    """Calls a kernel that computes y (m, k) from the arrays and quantises it.

    Args:
      target: the FFI target.
      source: how the kernel computes y: one of the sources of _tuning/quantize_config.py.
      arrays: the operands of that source. Those after the first that hold its 1x128 scales, as many
        as num_scales, have rows minor.
      groups: group_sizes and first_row. Mode "row" reads them only with has_ragged_rows.
      results: the types of the results: values and scales, and what else there is behind them.
      mode: "row", along k; "column" or "block_transposed", along the tokens of each group;
        "row_column" or "row_block_transposed", both.
      has_ragged_rows: whether mode "row" leaves rows behind the last group as they were. The
        sources with "swiglu" in their names can.
      activation: that of the sources with "swiglu" in their names.
    """
    # 1x128 scales are (rows, blocks) with rows minor, for the gemm kernels read them along rows.
    row_major, column_major, vector = (0, 1), (1, 0), (0,)
    is_ragged = has_ragged_rows or mode != "row"
    layouts = [row_major if x.ndim == 2 else vector for x in arrays]
    layouts[1 : 1 + num_scales] = [column_major] * num_scales
    m, n = arrays[0].shape
    config = quantize_config.attributes(
        mode,
        arrays[0].dtype,
        is_paired=quantize_config.takes_pairs(
            source, m, n // 2, arrays[0].dtype, extension.num_sms()
        ),
        e5m2=e5m2,
        pow2_scale=pow2_scale,
        is_ragged=is_ragged,
        source=source,
        activation=activation,
    )
    output_layouts = [row_major, column_major] * (len(results) // 2)
    output_layouts += [row_major] * (len(results) % 2)
    if modes.has_square_columns(mode):
        output_layouts[-1] = row_major
    call = jax.ffi.ffi_call(
        target,
        results,
        input_layouts=[*layouts, *[vector] * (2 * is_ragged)],
        output_layouts=output_layouts,
    )
    return list(call(*arrays, *(groups if is_ragged else ()), config=config))


def _partition_rule(*_, mode: str, **params) -> PartitionRule:
    """Rows stay on their device. A device gets columns of all tokens for some features c.

    For them, devices that hold different tokens exchange what they hold.
    """
    rows, columns = modes.split(mode)
    blocks = {"k": formats.SCALE_BLOCK} if rows else {}
    if modes.has_square_columns(mode):
        blocks |= dict.fromkeys("kc", formats.SCALE_BLOCK)
    return PartitionRule(
        ("t k", "sizes", "first"),
        ("t k",) * (2 if rows else 0) + ("c tokens",) * (2 if columns else 0),
        blocks,
        uncut=("sizes", "first", "tokens"),
        following={"c": ("k", "t")} if columns else {},
    )


def _run_shard(run, x, *groups, shards: Shards, mode: str, **params):
    of_rows, of_columns = modes.split(mode)
    if of_columns is None or shards.count("t") == 1:
        return run(x, *groups, mode=mode, **params)
    rows = run(x, *groups, mode=of_rows, **params) if of_rows else []
    x = shards.move(x, "t", 1, shards.axes["c"][len(shards.axes["k"]) :])
    return [*rows, *run(x, *groups, mode=of_columns, **params)]


quantize_ragged_p = define_primitive(
    "jax_fp8gemm_quantize_ragged",
    _shape_rule,
    Forms(reference, _ffi_call),
    dce_rule=keep_used_axes,
    mesh_rules=MeshRules(_partition_rule, _run_shard),
)
