"""product: the differentiable product of matmul and dot_general.

For lhs (m, k), rhs (k, n) and the cotangent dout (m, n), each product reads both of its operands
along the contraction. Brackets hold the scale blocks. The right column names the kernel.

    out  = lhs    [1x128 along k] . rhs    [128x128]          1d2d
    dlhs = dout   [1x128 along n] . rhs^T  [128x128]          1d2d
    drhs = lhs^T  [1x128 along m] . dout   [1x128 along m]    1d1d

With wgrad_lhs_block=(128, 128) in the recipe, lhs^T has 128x128 blocks in drhs, which is then a
2d1d product. dlhs reads the same quantised values of rhs as out. Sums are accumulated in f32. lhs
and dout are each read once for both of their quantisations. Rows of what is quantised here are
stored in whole scale blocks, which products read faster. The backward pass keeps FP8 values and
scales, under the names of CHECKPOINT_NAMES. Without a gradient, one kernel quantises few rows of
lhs and multiplies them. Scale blocks are those of the DeepSeek-V3 report,
section 3.3.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import formats
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.exact_product import exact_product
from jax_fp8gemm._ops.product_spec import (
    DType,
    ProductSpec,
    Weights,
    kernel_dtype,
    name_residual,
    quantize_args,
    with_shardings,
)
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._ops.weights import kept_and_transposed, refusing_gradients, transposed
from jax_fp8gemm._primitives.gemm import gemm
from jax_fp8gemm._primitives.quantize import quantize_rows, rows_and_columns
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs
from jax_fp8gemm._primitives.quantizing_gemm import is_faster, quantizing_gemm
from jax_fp8gemm._sharding.explicit_axes import (
    explicit_mesh,
    reshape,
    reshaped_spec,
    reshard,
    reshard_first,
    with_auto_axes,
)
from jax_fp8gemm._sharding.manual_axes import match_varying

# lhs and rhs. lhs is None where rhs has no gradient, and an array with wgrad="bf16".
_Kept: TypeAlias = tuple[jax.Array | ScaledArray | None, ScaledArray]


def products(
    spec: ProductSpec,
    lhs: jax.Array,
    rhs: Weights,
    num_batch_dims: int,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """Multiplies for each element of the first dimensions; a mesh may cut each of them.

    out_spec: how Explicit mesh axes cut the result; None where no axis is Explicit.
    """
    if out_spec is not None and num_batch_dims:
        batch = PartitionSpec(*out_spec.partitions[:num_batch_dims])
        lhs, rhs = jax.tree.map(lambda x: reshard_first(x, batch), (lhs, rhs))
        out_spec = PartitionSpec(*out_spec.partitions[num_batch_dims:])
    multiply = partial(product, spec, out_spec=out_spec)
    for _ in range(num_batch_dims):
        multiply = jax.vmap(multiply)
    return multiply(lhs, rhs)


@jax.named_scope("fp8gemm_matmul")
def product(
    spec: ProductSpec,
    lhs: jax.Array,
    rhs: Weights,
    out_spec: PartitionSpec | None = None,
) -> jax.Array:
    """Multiplies lhs (..., m, k) by rhs (k, n).

    out_spec: how Explicit mesh axes cut the result; None where no axis is Explicit.
    """
    if spec.is_exact:
        assert isinstance(rhs, jax.Array)
        return exact_product(spec, *match_varying(lhs, rhs), out_spec)
    spec = with_shardings(spec, lhs, rhs, out_spec)
    operands = match_varying(refusing_gradients("matmul", dict(rhs=rhs), lhs), rhs)
    return reverse_mode("matmul", partial(_product, spec), *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: ProductSpec, lhs: jax.Array, rhs: Weights) -> jax.Array:
    return product_of_rows(spec, lhs, rhs, spec.shardings.out)


def _product_fwd(spec: ProductSpec, lhs: jax.Array, rhs: Weights) -> tuple[jax.Array, _Kept]:
    """Quantises for both passes. Under jit, XLA drops what no wanted cotangent reads."""
    args = quantize_args(spec, spec.recipe.fwd)
    if spec.has_fp8_wgrad:
        column_block = spec.recipe.wgrad_lhs_block
        rows, lhs_residual = _rows_and_columns(lhs, column_block, **args)
    else:
        rows = quantize_rows(lhs, padded=True, **args)
        lhs_residual = None if spec.rhs_dtype is None else lhs
    kept_rhs, rhs_transposed = kept_and_transposed(spec, rhs)
    out_spec = spec.shardings.out
    out = _unfolded(spec, spec.out_dtype, rows, rhs_transposed, lhs.shape[:-1], out_spec)
    return name_residual("out", out), (name_residual("lhs", lhs_residual), kept_rhs)


def _product_bwd(spec: ProductSpec, kept: _Kept, dout: jax.Array) -> tuple[jax.Array, Any]:
    lhs, rhs = kept
    args = quantize_args(spec, spec.recipe.bwd)
    if spec.has_fp8_wgrad:
        rows, columns = _rows_and_columns(dout, (1, formats.SCALE_BLOCK), **args)
    else:
        rows, columns = quantize_rows(dout, padded=True, **args), None
    with jax.named_scope("dlhs"):
        dlhs = _unfolded(spec, spec.lhs_dtype, rows, rhs, dout.shape[:-1], spec.shardings.lhs)
    if spec.rhs_dtype is None:
        return dlhs, None
    with jax.named_scope("drhs"):
        rhs_spec = spec.shardings.rhs
        if columns is None:
            drhs = with_auto_axes(_bf16_wgrad, (lhs, dout), lambda: rhs_spec)
            return dlhs, spec.gradient_of_rhs(drhs.astype(spec.rhs_dtype))
        assert isinstance(lhs, ScaledArray)
        drhs = gemm_as(spec, spec.rhs_dtype, lhs, columns, rhs_spec)
        return dlhs, spec.gradient_of_rhs(drhs)


_product.defvjp(_product_fwd, _product_bwd)


def _rows_and_columns(
    x: jax.Array, column_block: tuple[int, int], **args: Unpack[QuantizeArgs]
) -> tuple[ScaledArray, ScaledArray]:
    return rows_and_columns(_with_whole_blocks(x), column_block, padded=True, **args)


def _with_whole_blocks(x: jax.Array) -> jax.Array:
    """Folds leading dimensions of `x` (..., m, k) into m until m consists of whole scale blocks.

    The blocks along m are then the same as if all leading dimensions were folded. If m never
    becomes a multiple of 128, all of them are.
    """
    *batch, m, k = x.shape
    while batch and m % formats.SCALE_BLOCK:
        m *= batch.pop()
    return reshape(x, (*batch, m, k))


def _unfolded(
    spec: ProductSpec,
    dtype: DType,
    lhs: ScaledArray,
    rhs: ScaledArray,
    rows: tuple[int, ...],
    out_spec: PartitionSpec | None,
) -> jax.Array:
    """Returns the product with its rows unfolded to `rows`, the shape before _with_whole_blocks."""
    n = rhs.shape[0]
    folded_spec = None
    if out_spec is not None:
        mesh = explicit_mesh((lhs, rhs))
        assert mesh is not None
        folded = (*lhs.shape[:-1], n)
        folded_spec = reshaped_spec((*rows, n), out_spec, folded, mesh.shape)
    return reshard(reshape(gemm_as(spec, dtype, lhs, rhs, folded_spec), (*rows, n)), out_spec)


def product_of_rows(
    spec: ProductSpec, lhs: jax.Array, rhs: Weights, out_spec: PartitionSpec | None
) -> jax.Array:
    """Returns the product of lhs (..., k) and rhs (k, n) where nobody keeps their quantisation.

    out_spec: as for `product`.
    """
    args = quantize_args(spec, spec.recipe.fwd)
    dtype = kernel_dtype(spec.out_dtype)
    if not spec.recipe.split_k and is_faster(lhs, rhs.shape[-1], dtype, args["pow2_scale"]):
        how = dtype, spec.reduce_dtype, out_spec
        out = quantizing_gemm(lhs, transposed(spec, rhs), *how, **args)
        return out.astype(spec.out_dtype)
    rows = quantize_rows(lhs, padded=True, **args)
    return gemm_as(spec, spec.out_dtype, rows, transposed(spec, rhs), out_spec)


def gemm_as(
    spec: ProductSpec,
    dtype: DType,
    lhs: ScaledArray,
    rhs: ScaledArray,
    out_spec: PartitionSpec | None,
) -> jax.Array:
    """Returns the product with a result of `dtype`. One in f16 is rounded from f32."""
    how = kernel_dtype(dtype), spec.implementation, None, spec.reduce_dtype, out_spec
    return gemm(lhs, rhs, *how, spec.recipe.split_k).astype(dtype)


def _bf16_wgrad(lhs: jax.Array, dout: jax.Array) -> jax.Array:
    lhs, dout = lhs.astype(jnp.bfloat16), dout.astype(jnp.bfloat16)
    rows = tuple(range(lhs.ndim - 1))
    contract_m = ((rows, rows), ((), ()))
    multiply = partial(
        lax.dot_general, dimension_numbers=contract_m, preferred_element_type=jnp.float32
    )
    # NOTE: XLA on a CPU has no product of bf16 with an f32 result where one operand has more
    # dimensions than a matrix, as under vmap over dout.
    in_f32 = lambda *operands: multiply(*(x.astype(jnp.float32) for x in operands))
    return lax.platform_dependent(lhs, dout, cpu=in_f32, default=multiply)
