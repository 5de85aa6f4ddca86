"""quantize, quantize_both: round bf16, f16 or f32 to FP8, with one f32 scale for each block.

_data/rounding.py defines scales and values to the bit, and is the reference. The kernel agrees with
it. The blocks are those of the DeepSeek-V3 report, section 3.3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._primitives.quantize import (
    quantize_in_mode,
    quantize_transposed,
    rows_and_columns,
)
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def quantize(
    x: Float[Array, "*batch m k"],
    *,
    block: tuple[int, int] = (1, 128),
    axis: int = -1,
    dtype: Any = jnp.float8_e4m3fn,
    pow2_scale: bool = False,
    with_transpose: bool | Literal["only"] = False,
    implementation: Implementation = None,
) -> ScaledArray:
    """Quantises `x` to FP8 with one f32 scale for each block.

    ScaledArray.dequantize converts the result back. This function is not differentiable.

    Args:
      x: (..., m, k) bf16, f16 or f32, with any m and k.
      block: with (1, 128), 128 neighbours along `axis` share a scale. With (128, 128), the elements
        of a square do.
      axis: -1, or -2 for scale blocks along m. The result is then that of x^T, (..., k, m), with
        scale (..., k, ceil(m / 128)), as a contraction over m reads it. Square blocks need -1.
      dtype: float8_e4m3fn or float8_e5m2.
      pow2_scale: whether to round each scale up to a power of two. Scaling is then exact.
      with_transpose: True stores the transposed values too, from the same read. "only" stores
        them alone: half the memory, for weights of products without a gradient. Either goes with
        square blocks.
      implementation: None runs the kernel where it can run, and elsewhere the reference, with one
        warning. "cuda" runs the kernel or raises. "xla" and "emulate" run the reference.
        The bits are the same.
    Returns:
      A ScaledArray of FP8 values and f32 scales. A block that holds an Inf or a NaN becomes NaN as
      a whole. The result is sharded as `x` is, where its shards hold whole blocks. In a shard_map
      `x` is the shard of a device, and the blocks start at its first element.
    Raises:
      TypeError: the dtype of x or `dtype` is wrong, a flag is no bool, or an argument other than x
        is traced.
      ValueError: the rank of x, block, axis, with_transpose or implementation is wrong.
      RuntimeError: implementation="cuda", and the kernel cannot run.
    """
    op = "quantize"
    x = arrays.as_array(x)
    checks.check_static(op, block=block, axis=axis)
    checks.check_bool(op, pow2_scale=pow2_scale)
    _check_with_transpose(op, with_transpose)
    _check_operand(op, x, dtype, implementation)
    checks.check_block(op, block)
    is_index = isinstance(axis, int | np.integer) and not isinstance(axis, bool)
    if not is_index or axis not in range(-x.ndim, x.ndim):
        raise ValueError(
            f"{op}: axis must be -1 or -2; got {checks.short_repr(axis)}, x {checks.short_type(x)}"
        )
    given, axis = axis, axis - x.ndim if axis >= 0 else axis
    if axis != -1 and (axis != -2 or block != (1, 128)):
        raise ValueError(
            f"{op}: axis must be -1, or -2 with block (1, 128); got axis {given}, block {block}, "
            f"x {checks.short_type(x)}"
        )
    if with_transpose and block != (128, 128):
        raise ValueError(
            f"{op}: with_transpose must go with block (128, 128); got block {block}. "
            "For 1x128 blocks along k and along m use quantize_both."
        )
    args = QuantizeArgs(dtype=dtype, pow2_scale=pow2_scale, implementation=implementation)
    if isinstance(with_transpose, str):
        return quantize_transposed(x, **args).T
    square = "block_both" if with_transpose else "block"
    mode = square if block == (128, 128) else {-1: "row", -2: "column"}[axis]
    (quantized,) = quantize_in_mode(x, mode, **args)
    return _batch_first(quantized) if mode == "column" else quantized


def quantize_both(
    x: Float[Array, "*batch m k"],
    *,
    dtype: Any = jnp.float8_e4m3fn,
    pow2_scale: bool = False,
    implementation: Implementation = None,
) -> tuple[ScaledArray, ScaledArray]:
    """Quantises `x` (..., m, k) along k and along m, and reads it once.

    Args:
      x, dtype, pow2_scale, implementation: as for `quantize`.
    Returns:
      quantize(x, axis=-1), (..., m, k), and quantize(x, axis=-2), (..., k, m).
    Raises:
      TypeError: the dtype of x or `dtype` is wrong, or pow2_scale is no bool.
      ValueError: the rank of x or implementation is wrong.
      RuntimeError: implementation="cuda", and the kernel cannot run.
    """
    x = arrays.as_array(x)
    checks.check_bool("quantize_both", pow2_scale=pow2_scale)
    _check_operand("quantize_both", x, dtype, implementation)
    args = QuantizeArgs(dtype=dtype, pow2_scale=pow2_scale, implementation=implementation)
    rows, columns = rows_and_columns(x, **args)
    return rows, _batch_first(columns)


def _batch_first(columns: ScaledArray) -> ScaledArray:
    """Transposes columns (k, ..., m) to (..., k, m)."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2), columns) if columns.ndim > 2 else columns


def _check_with_transpose(op: str, with_transpose: Any) -> None:
    checks.check_static(op, with_transpose=with_transpose)
    is_only = isinstance(with_transpose, str) and with_transpose == "only"
    if not is_only and not isinstance(with_transpose, bool | np.bool_):
        got = checks.short_repr(with_transpose)
        raise TypeError(f"{op}: with_transpose must be True, False or 'only'; got {got}")


def _check_operand(op: str, x: Any, dtype: Any, implementation: Any) -> None:
    checks.check_array(op, "x", x)
    checks.check_dtype(op, "x", x, formats.FLOAT_DTYPES)
    checks.check_min_ndim(op, "x", x, 2, "(..., m, k)")
    checks.check_out_dtype(op, "dtype", dtype, formats.FP8_DTYPES)
    checks.check_implementation(op, implementation)
