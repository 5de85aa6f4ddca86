"""The checks that the products of quantised operands share: scaled_matmul and the grouped ones."""

from __future__ import annotations

from typing import Any

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.formats import OUT_DTYPES
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array
from jax_fp8gemm._ops.product_spec import DType


def check_matrices(op: str, lhs: ScaledArray, rhs: ScaledArray, k: str, hint: str = "") -> None:
    """Raises unless lhs is a quantised matrix (m, k) and rhs one (n, k). k: how errors call it."""
    for name, x, rows in (("lhs", lhs, "m"), ("rhs", rhs, "n")):
        check_scaled_array(op, name, x)
        checks.check_ndim(op, name, x, 2, f"({rows}, {k})", hint=hint)


def check_block(op: str, name: str, x: ScaledArray, block: tuple[int, int]) -> None:
    """Raises ValueError unless `x` has this scale block."""
    if x.block != block:
        raise ValueError(f"{op}: {name}.block must be {block}; got {x.block}")


def check_result(
    op: str,
    shape: tuple[int, ...],
    out_dtype: Any,
    implementation: Any,
    accumulate_into: Any = None,
) -> DType:
    """Checks the arguments that concern a result of `shape`, and returns its dtype."""
    out_dtype = checks.check_out_dtype(op, "out_dtype", out_dtype, OUT_DTYPES)
    checks.check_implementation(op, implementation)
    if accumulate_into is not None:
        checks.check_array(op, "accumulate_into", accumulate_into)
        checks.check_accumulator(op, accumulate_into, shape, out_dtype)
    return out_dtype
