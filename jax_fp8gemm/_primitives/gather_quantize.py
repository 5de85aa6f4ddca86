"""gather_quantize_p: copies numbered rows of an array and quantises the copies.

For x (s, k) and every i < m, in f32:

    y[i] = x[rows[i]]                  without weights
    y[i] = x[rows[i]] * weights[i]     with weights

y is quantised as rows, as ragged columns or as both (quantize_ragged.py), and never stored. x may
be FP8 with its scales. An expert-parallel layer requantises such an x along tokens, for its weight
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.dequantize import spread_scale
from jax_fp8gemm._data.kept_rounding import widened
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._emulation import f32
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs, bind_in_mode, keep_used_axes
from jax_fp8gemm._primitives.quantize_ragged import call_kernel, reference, result_types
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.rule import PartitionRule

_OP = "gather_quantize"


@jax.named_scope("fp8gemm_gather_quantize")
def gather_quantize(
    x: jax.Array | ScaledArray,
    rows: jax.Array,
    weights: jax.Array | None,
    group_sizes: jax.Array,
    first_row: jax.Array,
    *,
    mode: str,
    **args: Unpack[QuantizeArgs],
) -> tuple[ScaledArray, ...]:
    """Quantises y, whose rows are sorted by group.

    Args:
      x: (s, k) bf16, f16 or f32; or a ScaledArray with block (1, 128), for modes of columns alone.
      rows: (m,) int32. A number below 0 means the first row, one past the end the last row.
      weights: (m,) f32, or None.
      group_sizes, first_row: int32, as for ragged_columns.
      mode: "row": (m, k), quantised along k. "column": (k, t), quantised along the tokens of each
        group. "row_column": both. "block_transposed" and "row_block_transposed" are the last two
        with 128x128 blocks of columns.
      args: the FP8 dtype, pow2_scale and the implementation.
    Returns:
      one ScaledArray, or two in modes of both.
    """
    arrays = values_and_scale(x) if isinstance(x, ScaledArray) else (x,)
    bind = partial(gather_quantize_p, is_weighted=weights is not None)
    of_weights = () if weights is None else (weights,)
    operands = *arrays, rows, *of_weights, group_sizes, first_row
    return bind_in_mode(bind, operands, mode, args)


def _split(operands: Sequence[Any], is_weighted: bool) -> tuple[Any, Any, Any, Any, Any]:
    """Returns x, [its scales], rows, [weights] and (group_sizes, first_row)."""
    x, *more, group_sizes, first_row = operands
    weights = [more.pop()] if is_weighted else []
    *scale, rows = more
    return x, scale, rows, weights, (group_sizes, first_row)


def _shape_rule(*operands, is_weighted: bool, mode: str, e5m2: bool, pow2_scale: bool):
    x, scale, rows, weights, (group_sizes, _) = _split(operands, is_weighted)
    checks.check_ndim(_OP, "x", x, 2, "(s, k)")
    if scale:
        checks.check_scaled(_OP, "x", x, scale[0], (1, formats.SCALE_BLOCK))
    else:
        checks.check_dtype(_OP, "x", x, formats.FLOAT_DTYPES)
    checks.check_ndim(_OP, "rows", rows, 1, "(m,)")
    checks.check_dtype(_OP, "rows", rows, (jnp.dtype(jnp.int32),))
    _groups.check_group_sizes(_OP, group_sizes)
    (s, k), (m,) = x.shape, rows.shape
    if m > 0 and s == 0:
        raise ValueError(
            f"{_OP}: x (s, k) must have a row if rows (m,) has one; "
            f"got x {checks.short_type(x)}, rows {checks.short_type(rows)}"
        )
    if scale and modes.split(mode)[0]:
        raise ValueError(
            f"{_OP}: mode must be 'column' or 'block_transposed' for an FP8 x; "
            f"got mode {mode!r}, x {checks.short_type(x)}"
        )
    expected = checks.short_type(jax.ShapeDtypeStruct((m,), jnp.float32))
    if weights and checks.short_type(weights[0]) != expected:
        raise ValueError(
            f"{_OP}: weights must be {expected}, one for each of rows; "
            f"got weights {checks.short_type(weights[0])}"
        )
    return result_types(m, k, group_sizes.shape[0], mode, e5m2)


def _reference(*operands, is_weighted: bool, **params) -> list[jax.Array]:
    return reference(gathered(*operands, is_weighted=is_weighted), *operands[-2:], **params)


def _emulation(*operands, is_weighted: bool, **params) -> list[jax.Array]:
    y = gathered(*operands, is_weighted=is_weighted, multiply=f32.multiply)
    return reference(y, *operands[-2:], **params)


def gathered(
    *operands, is_weighted: bool, multiply: Callable[..., jax.Array] = jnp.multiply
) -> jax.Array:
    """Returns y (m, k) f32, which the primitive with these operands quantises."""
    x, scale, rows, weights, _ = _split(operands, is_weighted)
    take = lambda a: jnp.take(a, rows, axis=0, mode="clip")
    if rows.size == 0:
        y = jnp.zeros((0, x.shape[1]), jnp.float32)
    elif scale:
        values = take(x)
        spread = spread_scale(take(scale[0]), values.shape, (1, 128))
        y = multiply(values.astype(jnp.float32), spread)
    else:
        y = widened(take(x))
    if weights:
        y = multiply(y, weights[0][:, None])
    return y


def _ffi_call(*operands, is_weighted: bool, **params) -> list[jax.Array]:
    x, scale, rows, weights, groups = _split(operands, is_weighted)
    results = _shape_rule(*operands, is_weighted=is_weighted, **params)
    if x.size == 0 or rows.size == 0:
        return _reference(*operands, is_weighted=is_weighted, **params)
    source = "weighted_gather" if is_weighted else "gather"
    arrays = [x, *scale, rows, *weights]
    target = extension.GATHER_QUANTIZE_TARGET
    return call_kernel(target, source, arrays, groups, results, num_scales=len(scale), **params)


def _partition_rule(*operands, is_weighted: bool, mode: str, **params) -> PartitionRule:
    """A mesh may cut the features alone, for a device may need any row of x."""
    _, scale, _, weights, _ = _split(operands, is_weighted)
    rows, columns = modes.split(mode)
    return PartitionRule(
        ("s k", *["s k"] * len(scale), "m", *["m"] * len(weights), "sizes", "first"),
        ("m k",) * (2 if rows else 0) + ("k tokens",) * (2 if columns else 0),
        {"k": formats.SCALE_BLOCK},
        uncut=("s", "m", "sizes", "first", "tokens"),
    )


gather_quantize_p = define_primitive(
    extension.GATHER_QUANTIZE_TARGET,
    _shape_rule,
    Forms(_reference, _ffi_call, _emulation),
    dce_rule=keep_used_axes,
    mesh_rules=MeshRules(_partition_rule),
)
