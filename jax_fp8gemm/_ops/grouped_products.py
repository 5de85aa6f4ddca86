"""grouped_gemm_as, grouped_wgrad_as: grouped products with results of any float dtype.

The kernels return bf16 or f32. A result in f16 is rounded from f32.
"""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import DType, ProductSpec, kernel_dtype
from jax_fp8gemm._primitives.grouped_gemm import UnusedRows, grouped_gemm
from jax_fp8gemm._primitives.grouped_wgrad import grouped_wgrad


def grouped_gemm_as(
    spec: ProductSpec,
    dtype: DType,
    lhs: ScaledArray,
    rhs: ScaledArray,
    sizes: jax.Array,
    first_row: jax.Array,
    out_spec: PartitionSpec | None = None,
    unused_rows: UnusedRows = "zero",
    spare_sms: int = 0,
) -> jax.Array:
    """Returns grouped_gemm with a result of `dtype`.

    out_spec: how Explicit mesh axes cut the result; None where no axis is Explicit. unused_rows,
    spare_sms: as for grouped_gemm.
    """
    how = kernel_dtype(dtype), spec.implementation, spec.reduce_dtype, out_spec, unused_rows
    out = grouped_gemm(lhs, rhs, sizes, first_row, *how, spare_sms=spare_sms)
    return out.astype(dtype)


def grouped_wgrad_as(
    spec: ProductSpec,
    dtype: DType,
    lhs: ScaledArray | None,
    rhs: ScaledArray | None,
    sizes: jax.Array,
    out_spec: PartitionSpec | None = None,
    accum: jax.Array | None = None,
) -> jax.Array:
    """Returns grouped_wgrad with a result of `dtype`.

    Neither operand may be None here. Its type allows None because a caller has no operand where the
    gradient is not wanted. out_spec: as for grouped_gemm_as. accum: f32, as is `dtype` then.
    """
    assert lhs is not None and rhs is not None
    how = kernel_dtype(dtype), spec.implementation, accum, out_spec
    return grouped_wgrad(lhs, rhs, sizes, *how).astype(dtype)
