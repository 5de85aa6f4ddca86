"""swiglu_quantize_p, swiglu_grad_quantize_p: quantise SwiGLU and its gradient as they compute them.

For gate_up (m, 2 f) = [gate, up] and the cotangent dh (m, f) of the result h (m, f), in f32:

    sigma = 1 / (1 + exp(-gate))
    silu  = gate * sigma
    h     = silu * up
    dgate = (dh * up) * (sigma + silu * (1 - sigma))
    dup   = dh * silu

In spite of their names they take every gated activation: gated.py has the others in the place of
silu. h and [dgate, dup] (m, 2 f) are quantised from these f32 values, as rows and as ragged columns
(quantize_ragged.py). They are never stored unquantised.

The last bits of the f32 values depend on the implementation: on its exp, and on where it fuses
products and sums. Their quantisation is exact. The kernel computes the same values in every mode,
and the emulation computes those values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data import checks, groups
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.formats import SCALE_BLOCK
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._emulation import gated as emulated
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.define import define_primitive
from jax_fp8gemm._primitives.gated import gated, gated_grad
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs, bind_in_mode, keep_used_axes
from jax_fp8gemm._primitives.quantize_ragged import call_kernel, reference, result_types
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.partition import Shards
from jax_fp8gemm._sharding.rule import PartitionRule

# The dtypes that a product returns.
_INPUT_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


@jax.named_scope("fp8gemm_swiglu_quantize")
def swiglu_quantize(
    gate_up: jax.Array,
    group_sizes: jax.Array,
    first_row: jax.Array,
    *,
    activation: Activation = "silu",
    with_columns: bool,
    column_block: tuple[int, int] = (1, SCALE_BLOCK),
    **args: Unpack[QuantizeArgs],
) -> tuple[ScaledArray, ScaledArray | None]:
    """Quantises h, computed from gate_up (m, 2 f).

    Returns rows (m, f), and columns (f, t) along the tokens of each group or, unless with_columns,
    None. activation says what h is. The other arguments are those of rows_and_ragged_columns.
    """
    operands = gate_up, group_sizes, first_row
    bind = partial(swiglu_quantize_p, activation=activation)
    mode = modes.of_columns(column_block, with_rows=True) if with_columns else "row"
    return _rows_and_columns(bind, operands, mode, args)


@jax.named_scope("fp8gemm_swiglu_grad_quantize")
def swiglu_grad_quantize(
    gate_up: jax.Array,
    dh: jax.Array,
    group_sizes: jax.Array,
    first_row: jax.Array,
    *,
    activation: Activation = "silu",
    with_columns: bool,
    **args: Unpack[QuantizeArgs],
) -> tuple[ScaledArray, ScaledArray | None]:
    """Quantises [dgate, dup], computed from gate_up (m, 2 f) and dh (m, f).

    Returns rows (m, 2 f) and columns (2 f, t), as swiglu_quantize does.
    """
    operands = gate_up, dh, group_sizes, first_row
    bind = partial(swiglu_grad_quantize_p, activation=activation)
    return _rows_and_columns(bind, operands, "row_column" if with_columns else "row", args)


def _rows_and_columns(
    bind: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    mode: str,
    args: QuantizeArgs,
) -> tuple[ScaledArray, ScaledArray | None]:
    rows, *columns = bind_in_mode(bind, operands, mode, args)
    return rows, columns[0] if columns else None


def _shape_rule(
    op: str, *operands, mode: str, e5m2: bool, pow2_scale: bool, activation: Activation
):
    """The operands are gate_up, for the gradient dh, group_sizes and first_row."""
    gate_up, *dh, group_sizes, _ = operands
    checks.check_ndim(op, "gate_up", gate_up, 2, "(m, 2 f)")
    checks.check_dtype(op, "gate_up", gate_up, _INPUT_DTYPES)
    groups.check_group_sizes(op, group_sizes)
    m, n = gate_up.shape
    if n % 2:
        raise ValueError(
            f"{op}: gate_up must be (m, 2 f); got gate_up {checks.short_type(gate_up)}"
        )
    expected = checks.short_type(jax.ShapeDtypeStruct((m, n // 2), gate_up.dtype))
    if dh and checks.short_type(dh[0]) != expected:
        raise ValueError(f"{op}: dh must be {expected}; got {checks.short_type(dh[0])}")
    return result_types(m, n if dh else n // 2, group_sizes.shape[0], mode, e5m2)


def _reference(function: Callable[..., jax.Array], *operands, activation: Activation, **params):
    *arrays, group_sizes, first_row = operands
    return reference(function(*arrays, activation), group_sizes, first_row, **params)


def _ffi_call(target: str, source: str, function: Callable[..., jax.Array], *operands, **params):
    *arrays, group_sizes, first_row = operands
    results = _shape_rule(target, *operands, **params)
    if arrays[0].size == 0:
        return _reference(function, *operands, **params)
    return call_kernel(target, source, arrays, (group_sizes, first_row), results, **params)


def _partition_rule(*operands, mode: str, **params) -> PartitionRule:
    """Rows stay on their device. Columns are cut so that gate and up of a feature stay together."""
    is_grad = len(operands) == 4
    rows, columns = modes.split(mode)
    row_dims, column_dims = ("t w", "w tokens") if is_grad else ("t f", "c tokens")
    return PartitionRule(
        ("t w", *["t f"] * is_grad, "sizes", "first"),
        (row_dims,) * (2 if rows else 0) + (column_dims,) * (2 if columns else 0),
        {"c": SCALE_BLOCK} if modes.has_square_columns(mode) else {},
        uncut=("w", "f", "sizes", "first", "tokens"),
        following={} if is_grad or not columns else {"c": ("t",)},
    )


def _run_shard(run, *operands, shards: Shards, mode: str, **params):
    """Computes columns from all tokens: devices exchange tokens for features of gate, up and dh."""
    of_rows, of_columns = modes.split(mode)
    if of_columns is None:
        return run(*operands, mode=mode, **params)
    gate_up, *dh, group_sizes, first_row = operands
    rows = run(*operands, mode=of_rows, **params) if of_rows else []
    halves = gate_up.reshape(gate_up.shape[0], 2, gate_up.shape[1] // 2)
    axes = shards.axes["t"] if dh else shards.axes["c"]
    axes = axes if halves.shape[2] % shards.count("t") == 0 else ()
    halves = shards.move(halves, "t", 2, axes)
    gate_up = halves.reshape(halves.shape[0], 2 * halves.shape[2])
    dh = [shards.move(x, "t", 1, axes) for x in dh]
    columns = run(gate_up, *dh, group_sizes, first_row, mode=of_columns, **params)
    if dh and axes:  # dgate and dup of a feature are no neighbours in the result, so gather both
        halves = [x.reshape(2, x.shape[0] // 2, x.shape[1]) for x in columns]
        halves = [lax.all_gather(x, axes, axis=1, tiled=True) for x in halves]
        columns = [x.reshape(-1, x.shape[2]) for x in halves]
    return [*rows, *columns]


def _define(
    target: str,
    source: str,
    function: Callable[..., jax.Array],
    emulated_function: Callable[..., jax.Array],
) -> Callable[..., Sequence[jax.Array]]:
    return define_primitive(
        target,
        shape_rule=partial(_shape_rule, target.removeprefix("jax_fp8gemm_")),
        reference=partial(_reference, function),
        ffi_call=partial(_ffi_call, target, source, function),
        emulation=partial(_reference, emulated_function),
        dce_rule=keep_used_axes,
        partition_rule=_partition_rule,
        run_shard=_run_shard,
    )


swiglu_quantize_p = _define(extension.SWIGLU_QUANTIZE_TARGET, "swiglu", gated, emulated.gated)
swiglu_grad_quantize_p = _define(
    extension.SWIGLU_GRAD_QUANTIZE_TARGET, "swiglu_grad", gated_grad, emulated.gated_grad
)
