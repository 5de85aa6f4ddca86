"""quantize_ragged: quantises along the tokens of each group, for a weight gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs
from jax_fp8gemm._primitives.quantize_ragged import check_operands, ragged_columns

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@naming_devices
def quantize_ragged(
    x: Float[Array, "m k"],
    group_sizes: Int[Array, " g"],
    *,
    dtype: Any = jnp.float8_e4m3fn,
    pow2_scale: bool = False,
    implementation: Implementation = None,
) -> ScaledArray:
    """Quantises x along the tokens of each group. scaled_ragged_wgrad takes the result.

    It is not differentiable.

    Args:
      x: (m, k) bf16, f16 or f32. Its rows, the tokens, are sorted by group.
      group_sizes: (g,) integers, the number of rows of each group, in order. A negative size counts
        as 0. A group that would end past row m ends there. Rows past the sum are left out.
      dtype: float8_e4m3fn or float8_e5m2.
      pow2_scale: whether to round each scale up to a power of two.
      implementation: as for quantize.
    Returns:
      A ScaledArray (k, t) of x^T with block (1, 128) and t = (m + 127 g) // 128 * 128. Group i
      starts at column 128 * (the number of 128-row blocks of the groups before it). Columns that
      hold no token are zero. A block that holds an Inf or a NaN becomes NaN as a whole. The mesh
      axes that cut k or m cut the k of the result; no axis cuts t.
    Raises:
      TypeError: a dtype is wrong, or pow2_scale is no bool.
      ValueError: a rank or implementation is wrong, or there are not 1 to 1024 groups.
      RuntimeError: implementation="cuda", and the kernel cannot run.
    """
    op = "quantize_ragged"
    x, group_sizes = map(arrays.as_array, (x, group_sizes))
    checks.check_bool(op, pow2_scale=pow2_scale)
    for name, operand in (("x", x), ("group_sizes", group_sizes)):
        checks.check_array(op, name, operand)
    check_operands(op, x, group_sizes)
    dtype = checks.check_out_dtype(op, "dtype", dtype, formats.FP8_DTYPES)
    checks.check_implementation(op, implementation)
    args = QuantizeArgs(dtype=dtype, pow2_scale=pow2_scale, implementation=implementation)
    return ragged_columns(x, *Groups.of_sizes(group_sizes), **args)
