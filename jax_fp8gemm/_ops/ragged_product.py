"""ragged_product and ragged_contraction: the differentiable products of ragged_dot and of
ragged_dot_general.

In the formulas, `rows` are the rows of group i, its tokens. Brackets hold the scale blocks of each
operand along the contraction. The right column names the kernel.

ragged_product, for lhs (m, k), rhs (g, k, n) and the cotangent dout (m, n):

    out[rows]  = lhs[rows]   [1x128 along k]      . rhs[i]     [128x128]            1d2d
    dlhs[rows] = dout[rows]  [1x128 along n]      . rhs[i]^T   [128x128]            1d2d
    drhs[i]    = lhs[rows]^T [1x128 along tokens] . dout[rows] [1x128 along tokens] 1d1d

ragged_contraction, for lhs (m, k), rhs (m, n) and the cotangent dout (g, k, n):

    out[i]     = lhs[rows]^T [1x128 along tokens] . rhs[rows]  [1x128 along tokens] 1d1d
    dlhs[rows] = rhs[rows]   [1x128 along n]      . dout[i]^T  [128x128]            1d2d
    drhs[rows] = lhs[rows]   [1x128 along k]      . dout[i]    [128x128]            1d2d

With wgrad_lhs_block=(128, 128) in the recipe, lhs[rows]^T has 128x128 blocks in drhs[i], which is
then a 2d1d product. Both 1d2d products of a function read the same quantised values of rhs, or of
dout. An operand that is needed in two quantisations is read once for both. Sums are accumulated in
f32. Scale blocks are those of the DeepSeek-V3 report, section 3.3.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.grouped_products import grouped_gemm_as, grouped_wgrad_as
from jax_fp8gemm._ops.product_spec import ProductSpec, Weights, name_residual, quantize_args
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm._ops.ragged_xla import XlaOptions, xla_ragged_contraction
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._ops.weights import (
    both_ways,
    kept_and_transposed,
    refusing_gradients,
    transposed,
)
from jax_fp8gemm._primitives.quantize_ragged import ragged_columns, rows_and_ragged_columns
from jax_fp8gemm._sharding.manual_axes import match_varying

# lhs, rhs and the groups. lhs is None where rhs has no gradient, and an array with wgrad="bf16".
_Kept: TypeAlias = tuple[jax.Array | ScaledArray | None, ScaledArray, Groups]
# lhs and rhs as rows, and the sizes of the groups.
_KeptRows: TypeAlias = tuple[ScaledArray, ScaledArray, jax.Array]


@jax.named_scope("fp8gemm_ragged_dot")
def ragged_product(spec: ProductSpec, lhs: jax.Array, rhs: Weights, groups: Groups) -> jax.Array:
    """Returns out[rows] = lhs[rows] . rhs[i] in FP8, (m, n)."""
    lhs = refusing_gradients("ragged_dot", dict(rhs=rhs), lhs)
    operands = match_varying(lhs, rhs, groups)
    return reverse_mode("ragged_dot", partial(_product, spec), *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: ProductSpec, lhs: jax.Array, rhs: Weights, groups: Groups) -> jax.Array:
    rows = quantize(lhs, **quantize_args(spec, spec.recipe.fwd))
    return grouped_gemm_as(
        spec, spec.out_dtype, rows, transposed(spec, rhs), *groups, spec.shardings.out
    )


def _product_fwd(
    spec: ProductSpec, lhs: jax.Array, rhs: Weights, groups: Groups
) -> tuple[jax.Array, _Kept]:
    """Quantises for both passes. Under jit, XLA drops what no wanted cotangent reads."""
    args = quantize_args(spec, spec.recipe.fwd)
    if spec.has_fp8_wgrad:
        column_block = spec.recipe.wgrad_lhs_block
        rows, lhs_residual = rows_and_ragged_columns(lhs, *groups, column_block, **args)
    else:
        rows, lhs_residual = quantize(lhs, **args), None if spec.rhs_dtype is None else lhs
    kept_rhs, rhs_transposed = kept_and_transposed(spec, rhs)
    out = grouped_gemm_as(spec, spec.out_dtype, rows, rhs_transposed, *groups, spec.shardings.out)
    return name_residual("out", out), (name_residual("lhs", lhs_residual), kept_rhs, groups)


def _product_bwd(spec: ProductSpec, kept: _Kept, dout: jax.Array) -> tuple[jax.Array, Any, None]:
    lhs, rhs, groups = kept
    args = quantize_args(spec, spec.recipe.bwd)
    columns = None
    if spec.has_fp8_wgrad:
        rows, columns = rows_and_ragged_columns(dout, *groups, **args)
    else:
        rows = quantize(dout, **args)
    with jax.named_scope("dlhs"):
        dlhs = grouped_gemm_as(spec, spec.lhs_dtype, rows, rhs, *groups, spec.shardings.lhs)
    if spec.rhs_dtype is None:
        return dlhs, None, None
    with jax.named_scope("drhs"):
        rhs_spec = spec.shardings.rhs
        if columns is None:
            assert isinstance(lhs, jax.Array)
            drhs = _bf16_wgrad(lhs, dout, groups, rhs_spec).astype(spec.rhs_dtype)
        else:
            assert isinstance(lhs, ScaledArray)
            drhs = grouped_wgrad_as(spec, spec.rhs_dtype, lhs, columns, groups.sizes, rhs_spec)
    return dlhs, spec.gradient_of_rhs(drhs), None


_product.defvjp(_product_fwd, _product_bwd)


def _bf16_wgrad(
    lhs: jax.Array, dout: jax.Array, groups: Groups, out_spec: PartitionSpec | None
) -> jax.Array:
    lhs, dout = lhs.astype(jnp.bfloat16), dout.astype(jnp.bfloat16)
    options = XlaOptions(None, jnp.dtype(jnp.float32), out_spec)
    return xla_ragged_contraction(lhs, dout, groups, options)


def ragged_contraction(
    spec: ProductSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Returns out[i] = lhs[rows]^T . rhs[rows] in FP8, (g, k, n). Group 0 starts at row 0."""
    operands = match_varying(lhs, rhs, sizes)
    return reverse_mode("ragged_dot_general", partial(_contraction, spec), *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contraction(spec: ProductSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    args = quantize_args(spec, spec.recipe.fwd)
    lhs_columns = ragged_columns(lhs, *Groups.of_sizes(sizes), **args)
    rhs_columns = ragged_columns(rhs, *Groups.of_sizes(sizes), **args)
    return grouped_wgrad_as(
        spec, spec.out_dtype, lhs_columns, rhs_columns, sizes, spec.shardings.out
    )


def _contraction_fwd(
    spec: ProductSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, _KeptRows]:
    """Quantises for both passes. Under jit, XLA drops what no wanted cotangent reads."""
    args = quantize_args(spec, spec.recipe.fwd)
    lhs_rows, lhs_columns = rows_and_ragged_columns(lhs, *Groups.of_sizes(sizes), **args)
    rhs_rows, rhs_columns = rows_and_ragged_columns(rhs, *Groups.of_sizes(sizes), **args)
    out = grouped_wgrad_as(
        spec, spec.out_dtype, lhs_columns, rhs_columns, sizes, spec.shardings.out
    )
    kept = name_residual("lhs", lhs_rows), name_residual("rhs", rhs_rows)
    return name_residual("out", out), (*kept, sizes)


def _contraction_bwd(
    spec: ProductSpec, kept: _KeptRows, dout: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, sizes = kept
    assert spec.rhs_dtype is not None
    # Kernels read operands along the contraction. dlhs contracts n and takes dout as it is. drhs
    # contracts k and takes it transposed.
    dout_kn, dout_nk = both_ways(spec, spec.recipe.bwd, dout)
    groups, shardings = Groups.of_sizes(sizes), spec.shardings
    with jax.named_scope("dlhs"):
        dlhs = grouped_gemm_as(spec, spec.lhs_dtype, rhs, dout_kn, *groups, shardings.lhs)
    with jax.named_scope("drhs"):
        drhs = grouped_gemm_as(spec, spec.rhs_dtype, lhs, dout_nk, *groups, shardings.rhs)
    return dlhs, drhs, None


_contraction.defvjp(_contraction_fwd, _contraction_bwd)
