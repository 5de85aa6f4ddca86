"""quantize: bf16, f16 or f32 to FP8 with one f32 scale a block.

_rounding.py says what a scale and a value are, to the bit, and is the reference; the kernel agrees
with it. Scale blocks of DeepSeek-V3 (report, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from jax_fp8gemm import _checks, _ffi, _quantize_config
from jax_fp8gemm._explicit import result_specs, with_auto_axes
from jax_fp8gemm._partition_rule import PartitionRule
from jax_fp8gemm._primitive import define_primitive, map_batch
from jax_fp8gemm._rounding import block_types, quantize_blocks
from jax_fp8gemm._scaled_array import ScaledArray

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Implementation = Literal["cuda", "xla"] | None

_BLOCK = _checks.SCALE_BLOCK
_SQUARE = ("block", "block_transposed", "block_both")  # modes that take a batch as it is


def quantize(
    x: Float[Array, "*batch m k"],
    *,
    block: tuple[int, int] = (1, 128),
    axis: int = -1,
    dtype: Any = jnp.float8_e4m3fn,
    pow2_scale: bool = False,
    with_transpose: bool = False,
    implementation: Implementation = None,
) -> ScaledArray:
    """Quantises `x` to FP8 with one scale a block; ScaledArray.dequantize undoes it.

    Args:
      x: (..., m, k) bf16, f16 or f32; any m and k.
      block: (1, 128): 128 neighbours along `axis` share a scale. (128, 128): squares do.
      axis: -1, or -2 for scale blocks along m: the result is then that of x^T, (..., k, m) with
        scale (..., k, ceil(m / 128)), as a contraction over m reads it. -1 with square blocks.
      dtype: float8_e4m3fn or float8_e5m2.
      pow2_scale: round each scale up to a power of two; scaling is then exact.
      with_transpose: also store the transposed values, from the same read; square blocks only.
      implementation: None, the kernel where it can run and the reference elsewhere, with one
        warning; "cuda", the kernel or an error; "xla", the reference. All give the same bits.
    Returns:
      ScaledArray of the values and f32 scales. A block with an Inf or a NaN is NaN throughout.
      Not differentiable. Sharded as `x`, where its shards hold whole blocks.
    Raises:
      TypeError: dtype of x, or `dtype`. ValueError: rank, block, axis, with_transpose.
      RuntimeError: implementation="cuda" where the kernel cannot run.
    """
    op = "quantize"
    _check_operand(op, x, dtype, implementation)
    _checks.check_block(op, block)
    if axis not in range(-x.ndim, x.ndim):
        raise ValueError(f"{op}: axis must be -1 or -2; got {axis}, x {_checks.short_type(x)}")
    axis = axis - x.ndim if axis >= 0 else axis
    if axis != -1 and (axis != -2 or block != (1, 128)):
        raise ValueError(
            f"{op}: axis must be -1, or -2 with block (1, 128); got axis {axis}, block {block}, "
            f"x {_checks.short_type(x)}"
        )
    if with_transpose and block != (128, 128):
        raise ValueError(
            f"{op}: with_transpose must go with block (128, 128); got block {block}. "
            "For 1x128 blocks along rows and columns use quantize_both."
        )
    square = "block_both" if with_transpose else "block"
    mode = square if block == (128, 128) else {-1: "row", -2: "column"}[axis]
    results = _run(x, mode, dtype, pow2_scale, implementation)
    transposed = results[1] if with_transpose else None
    return ScaledArray(results[0], results[-1], transposed, block)


def quantize_both(
    x: Float[Array, "*batch m k"],
    *,
    dtype: Any = jnp.float8_e4m3fn,
    pow2_scale: bool = False,
    implementation: Implementation = None,
) -> tuple[ScaledArray, ScaledArray]:
    """Quantises `x` along its rows and along its columns in one read of it.

    Args: as for `quantize`.
    Returns:
      quantize(x, axis=-1) of shape (..., m, k), and quantize(x, axis=-2) of shape (..., k, m).
    """
    _check_operand("quantize_both", x, dtype, implementation)
    rows, row_scale, columns, column_scale = _run(
        x, "row_column", dtype, pow2_scale, implementation
    )
    return ScaledArray(rows, row_scale), ScaledArray(columns, column_scale)


def quantize_transposed(
    x: Float[Array, "*batch k n"], *, dtype: Any, pow2_scale: bool, implementation: Implementation
) -> ScaledArray:
    """quantize(x, block=(128, 128)).T without storing the untransposed values."""
    values, scale = _run(x, "block_transposed", dtype, pow2_scale, implementation)
    return ScaledArray(values, scale, None, (128, 128))


def _check_operand(op: str, x: Any, dtype: Any, implementation: Any) -> None:
    _checks.check_array(op, "x", x)
    _checks.check_dtype(op, "x", x, _checks.FLOAT_DTYPES)
    _checks.check_min_ndim(op, "x", x, 2, "(..., m, k)")
    _checks.check_out_dtype(op, "dtype", dtype, _checks.FP8_DTYPES)
    _checks.check_implementation(op, implementation)


@jax.named_scope("fp8gemm_quantize")
def _run(x, mode: str, dtype, pow2_scale: bool, implementation) -> Sequence[jax.Array]:
    params: dict[str, Any] = dict(
        mode=mode,
        e5m2=jnp.dtype(dtype) == jnp.float8_e5m2,
        pow2_scale=bool(pow2_scale),
    )
    x = jnp.asarray(x)
    out_specs = lambda: result_specs(_partition_rule(x, **params), [x])
    run = partial(_run_folded, implementation=implementation, **params)
    return with_auto_axes(run, [x], out_specs)


def _run_folded(x, *, mode: str, **params) -> Sequence[jax.Array]:
    """Binds the primitive, with the leading dimensions of `x` folded into one that is mapped."""
    if x.ndim == 2:
        return quantize_p(x, mode=mode, **params)
    batch = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    run = partial(quantize_p, mode=mode, **params)
    results = run(batch) if mode in _SQUARE else jax.vmap(run)(batch)
    return [result.reshape(*x.shape[:-2], *result.shape[1:]) for result in results]


def _shape_rule(x, *, mode: str, e5m2: bool, pow2_scale: bool) -> list[jax.ShapeDtypeStruct]:
    if x.ndim != 3:
        _checks.check_ndim("quantize", "x", x, 2, "(m, k)")
    *batch, m, k = x.shape
    rows, columns = block_types(m, k, 1, e5m2, batch), block_types(k, m, 1, e5m2, batch)
    values, scale = block_types(m, k, _BLOCK, e5m2, batch)
    transposed = block_types(k, m, _BLOCK, e5m2, batch)
    return {
        "row": rows,
        "column": columns,
        "row_column": rows + columns,
        "block": [values, scale],
        "block_transposed": transposed,
        "block_both": [values, transposed[0], scale],
    }[mode]


def _reference(x, *, mode: str, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    if x.ndim == 3:
        return jax.vmap(lambda x: _reference(x, mode=mode, e5m2=e5m2, pow2_scale=pow2_scale))(x)
    x = x.astype(jnp.float32)
    rows = lambda x: quantize_blocks(x, 1, e5m2, pow2_scale)
    if mode == "row":
        return rows(x)
    if mode == "column":
        return rows(x.T)
    if mode == "row_column":
        return rows(x) + rows(x.T)
    values, scale = quantize_blocks(x, _BLOCK, e5m2, pow2_scale)
    return {
        "block": [values, scale],
        "block_transposed": [values.T, scale.T],
        "block_both": [values, values.T, scale],
    }[mode]


def _ffi_call(x, *, mode: str, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    params: dict[str, Any] = dict(mode=mode, e5m2=e5m2, pow2_scale=pow2_scale)
    results = _shape_rule(x, **params)
    if x.size == 0:
        return _reference(x, **params)
    if x.ndim == 3 and mode not in _SQUARE:
        return map_batch(partial(_ffi_call, **params), [x], [0])
    # A 1x128 scale is (rows, blocks) with rows minor: the gemm kernel reads it along the rows.
    row_major, column_major = tuple(range(x.ndim)), (1, 0)
    scale_layout = row_major if mode in _SQUARE else column_major
    config = _quantize_config.attributes(mode, x.dtype, e5m2=e5m2, pow2_scale=pow2_scale)
    call = jax.ffi.ffi_call(
        _ffi.QUANTIZE_TARGET,
        results,
        input_layouts=[row_major],
        output_layouts=[scale_layout if r.dtype == jnp.float32 else row_major for r in results],
    )
    return list(call(x, config=config))


def _batch_rule(operands, dims, *, mode: str, **params):
    """Folds the batch into m where the kernel takes no batch and no scale block would then span
    two elements."""
    x = jnp.moveaxis(operands[0], dims[0], 0)
    m, k = x.shape[-2:]
    if x.ndim == 4 or mode in _SQUARE or (mode != "row" and m % _BLOCK):
        matrices = x.reshape(math.prod(x.shape[:-2]), m, k)
        results = quantize_p(matrices, mode=mode, **params)
        return [y.reshape(*x.shape[:-2], *y.shape[1:]) for y in results], [0] * len(results)
    batch = x.shape[0]
    results = quantize_p(x.reshape(batch * m, k), mode=mode, **params)
    params.pop("implementation")
    elements = _shape_rule(jax.ShapeDtypeStruct((m, k), x.dtype), mode=mode, **params)
    unfolded = [
        _unfold(result, batch, element.shape, is_transposed)
        for result, element, is_transposed in zip(results, elements, _TRANSPOSED[mode], strict=True)
    ]
    return unfolded, [0] * len(results)


# Whether m is the last dimension of each result rather than the first.
_TRANSPOSED = {
    "row": (False, False),
    "column": (True, True),
    "row_column": (False, False, True, True),
}


def _unfold(x, batch: int, shape: tuple[int, int], is_transposed: bool) -> jax.Array:
    if is_transposed:
        return jnp.moveaxis(x.reshape(shape[0], batch, shape[1]), 1, 0)
    return x.reshape(batch, *shape)


def _partition_rule(x, *, mode: str, e5m2: bool, pow2_scale: bool) -> PartitionRule:
    batch = "".join(f"b{i} " for i in range(x.ndim - 2))
    rows, columns = f"{batch}m k", f"{batch}k m"
    results = {
        "row": (rows, rows),
        "column": (columns, columns),
        "row_column": (rows, rows, columns, columns),
        "block": (rows, rows),
        "block_transposed": (columns, columns),
        "block_both": (rows, columns, rows),
    }[mode]
    blocked = {"row": "k", "column": "m"}.get(mode, "mk")
    return PartitionRule((rows,), results, dict.fromkeys(blocked, _BLOCK))


def _dce_rule(used, *, mode: str, **params) -> tuple[dict[str, Any], Sequence[int]]:
    """Along one axis only, or without the transposed values, where the rest is not used."""
    if mode == "block_both" and not used[1]:
        return dict(params, mode="block"), (0, 2)
    return keep_used_axes(used, mode=mode, **params)


def keep_used_axes(used, *, mode: str, **params) -> tuple[dict[str, Any], Sequence[int]]:
    """dce_rule of what has a mode "row_column": along one axis only, where that is enough."""
    kept = range(len(used))
    if mode == "row_column" and not any(used[2:]):
        mode, kept = "row", (0, 1)
    elif mode == "row_column" and not any(used[:2]):
        mode, kept = "column", (2, 3)
    return dict(params, mode=mode), kept


quantize_p = define_primitive(
    "jax_fp8gemm_quantize",
    shape_rule=_shape_rule,
    reference=_reference,
    ffi_call=_ffi_call,
    batch_rule=_batch_rule,
    dce_rule=_dce_rule,
    partition_rule=_partition_rule,
)
