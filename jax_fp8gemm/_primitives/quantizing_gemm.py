"""quantizing_gemm_p: the product of gemm.py for few rows of lhs in bf16, which it quantises.

For lhs (m, k), rhs (n, k) and m up to 8:

    rows = lhs, quantised along k      as quantize.py
    out  = rows . rhs^T                as gemm.py

The bits are those of the two primitives one after another, in each implementation. The quantised
rows are not stored. A forward pass alone can do without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import ml_dtypes
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._primitives import gemm, quantize
from jax_fp8gemm._primitives.joint import define_joint_primitive
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import few_rows

_OP = "quantizing_gemm"
_BLOCK = formats.SCALE_BLOCK


def is_faster(lhs: jax.Array, n: Any, out_dtype: Any, pow2_scale: bool) -> bool:
    """Returns whether this primitive is the faster way to a product of n columns, and can do it."""
    if lhs.dtype != jnp.bfloat16 or pow2_scale:
        return False
    m, k = math.prod(lhs.shape[:-1]), lhs.shape[-1]
    out_f32 = jnp.dtype(out_dtype) == jnp.float32
    return few_rows.quantizing_config(m, n, k, out_f32=out_f32) is not None


@jax.named_scope("fp8gemm_quantizing_gemm")
def quantizing_gemm(
    lhs: jax.Array,
    rhs: ScaledArray,
    out_dtype: Any,
    reduce_dtype: Any = jnp.float32,
    out_spec: PartitionSpec | None = None,
    **args: Unpack[QuantizeArgs],
) -> jax.Array:
    """Multiplies lhs (..., k), quantised along k, by the transpose of rhs (n, k).

    Args:
      lhs: bf16, at most 8 rows.
      rhs: block (128, 128).
      out_dtype: bfloat16 or float32.
      reduce_dtype, out_spec: as for gemm. The kernel has no partial sums.
      args: how lhs is quantised. pow2_scale is False.
    Returns:
      (..., n) array of out_dtype.
    """
    (out,) = quantizing_gemm_p(
        lhs,
        *values_and_scale(rhs),
        # Behind lhs there are values and scale of rhs here, and the scale of lhs too in gemm.
        twins={i - 1: twin for i, twin in gemm.twins_of_rhs(rhs).items()},
        out_dtype=jnp.dtype(out_dtype),
        reduce_dtype=jnp.dtype(reduce_dtype),
        out_spec=out_spec,
        e5m2=jnp.dtype(args["dtype"]) == jnp.float8_e5m2,
        implementation=args["implementation"],
    )
    return out


def _shape_rule(lhs, rhs, rhs_scale, *, out_dtype: Any, **params: Any):
    checks.check_min_ndim(_OP, "lhs", lhs, 1, "(..., k)")
    checks.check_dtype(_OP, "lhs", lhs, (jnp.dtype(jnp.bfloat16),))
    checks.check_scaled(_OP, "rhs", rhs, rhs_scale, (_BLOCK, _BLOCK))
    if formats.num_blocks(lhs.shape[-1]) != formats.num_blocks(rhs.shape[1]):
        checks.check_same_k(_OP, lhs, lhs.shape[-1], rhs, rhs.shape[1])
    return [jax.ShapeDtypeStruct((*lhs.shape[:-1], rhs.shape[0]), out_dtype)]


def apart(
    lhs,
    rhs,
    rhs_scale,
    *,
    implementation,
    out_dtype: Any,
    reduce_dtype: Any,
    out_spec: PartitionSpec | None,
    e5m2: bool,
    twins: Mapping[int, jax.Array] = MappingProxyType({}),
):
    """Computes the product by two primitives."""
    fp8 = jnp.dtype(jnp.float8_e5m2 if e5m2 else jnp.float8_e4m3fn)
    how = QuantizeArgs(dtype=fp8, pow2_scale=False, implementation=implementation)
    rows = quantize.quantize_rows(lhs, padded=True, **how)
    return gemm.gemm_p(
        *values_and_scale(rows),
        rhs,
        rhs_scale,
        twins={i + 1: twin for i, twin in twins.items()},
        out_specs=None if out_spec is None else [out_spec],
        implementation=implementation,
        num_k_dims=1,
        is_1d1d=False,
        is_2d1d=False,
        out_dtype=out_dtype,
        reduce_dtype=reduce_dtype,
        split_k=False,
    )


def _ffi_call(lhs, rhs, rhs_scale, *, out_dtype: Any, e5m2: bool, reduce_dtype: Any, out_spec: Any):
    """Calls the kernel. It needs k % 16 == 0 of rhs and n % 8 == 0, so rhs is padded with zeros.

    A device may have other multiprocessors than the one that `is_faster` thought of, and other
    tiles. Two kernels compute the product then.
    """
    *rows, k = lhs.shape
    m, n = math.prod(rows), rhs.shape[0]
    lhs = lhs.reshape(m, k)
    out_f32, num_sms = out_dtype == jnp.float32, extension.num_sms()
    config = few_rows.quantizing_config(m, n, k, out_f32=out_f32, num_sms=num_sms)
    if config is None:
        quantised = quantize.ffi_call(
            lhs, mode="row", e5m2=e5m2, pow2_scale=False, padded=k % _BLOCK != 0
        )
        (out,) = gemm.ffi_call(*quantised, rhs, rhs_scale, is_1d1d=False, out_dtype=out_dtype)
        return [out.reshape(*rows, n)]
    if rhs.shape[1] % 16:
        rhs = jnp.pad(rhs, ((0, 0), (0, -rhs.shape[1] % 16)))
    row_major = (0, 1)
    out = jax.ffi.ffi_call(
        extension.QUANTIZING_GEMM_TARGET,
        jax.ShapeDtypeStruct((m, n + -n % 8), out_dtype),
        input_layouts=[row_major] * 3,
        output_layouts=row_major,
    )(
        lhs,
        rhs,
        rhs_scale,
        config=config.attributes(
            is_1d1d=False,
            lhs_e5m2=e5m2,
            rhs_e5m2=rhs.dtype == ml_dtypes.float8_e5m2,
            out_f32=out_f32,
            accumulate=False,
            num_sms=num_sms,
        ),
    )
    return [out[:, :n].reshape(*rows, n)]


quantizing_gemm_p = define_joint_primitive(
    "jax_fp8gemm_quantizing_gemm", _shape_rule, _ffi_call, apart, batches_apart=True
)
