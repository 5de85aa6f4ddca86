"""matmul: bf16, f16 or f32 in and out, FP8 inside, with its own derivatives.

For lhs (m, k), rhs (k, n) and the cotangent dout (m, n), each product reads both of its operands
along the contraction; in brackets their scale blocks:

    out  = lhs    [1x128 along k] . rhs    [128x128]          1d2d
    dlhs = dout   [1x128 along n] . rhs^T  [128x128]          1d2d, the very values of out's rhs
    drhs = lhs^T  [1x128 along m] . dout   [1x128 along m]    1d1d

Accumulation is f32 throughout. lhs and dout are each read once for both of their quantisations.
What the backward pass keeps is FP8 with its scales, under the names of CHECKPOINT_NAMES.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm import _checks
from jax_fp8gemm._explicit import check_out_sharding, with_auto_axes
from jax_fp8gemm._gemm import gemm
from jax_fp8gemm._matmul_spec import (
    MatmulSpec,
    check_precision,
    kernel_dtype,
    make_spec,
    name_residual,
    quantize_args,
    spec_of,
)
from jax_fp8gemm._mesh_axes import match_varying
from jax_fp8gemm._quantize import Implementation, quantize, rows_and_columns
from jax_fp8gemm._recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._weights import both_ways, check_weights, transposed, without_gradient

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def matmul(
    lhs: Float[Array, "*batch m k"],
    rhs: Float[Array, "*batch k n"] | ScaledArray,
    *,
    recipe: Recipe = DEEPSEEK_V3,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: Implementation = None,
    out_sharding: Any = None,
) -> Float[Array, "*batch m n"]:
    """Multiplies arrays of the shapes of jnp.matmul, in FP8 with f32 accumulation.

    Differentiable once, in reverse mode. Any m, n and k; batch dimensions broadcast. Batch
    dimensions of lhs alone are folded into m.

    Args:
      lhs: (..., m, k) or (k,), bf16, f16 or f32.
      rhs: (..., k, n) or (k,), bf16, f16 or f32; or a ScaledArray (k, n) with block (128, 128),
        quantised once for many products: its own format is used, and it has no gradient. Give it
        `transposed` (quantize with_transpose=True), which is what the product reads.
      recipe: formats and scale blocks; DEEPSEEK_V3, HYBRID, BF16 or another.
      precision: None or DEFAULT: FP8. HIGH or HIGHEST, for either operand: a plain XLA dot at that
        precision, without FP8. `jax.default_matmul_precision` has no say: calling this function
        asks for FP8.
      preferred_element_type: dtype of the result, bf16, f16 or f32; default that of both operands,
        f32 where they differ. Weakly typed operands count as others, as in lax.dot_general.
      implementation: None, the kernels where they can run and the reference elsewhere, with one
        warning; "cuda", the kernels or an error; "xla", the reference.
      out_sharding: sharding of the result over the operands' Explicit mesh axes, as in jnp.matmul:
        needed where k is sharded over one. A PartitionSpec needs the mesh of jax.set_mesh.
    Returns:
      (..., m, n) array. Gradients have the dtypes of their operands.
    Raises:
      TypeError: a dtype. ValueError: shapes, precision, implementation, scale block, out_sharding.
      NotImplementedError: a second derivative.
      RuntimeError: implementation="cuda" where the kernels cannot run.

    On a mesh, under jit, each device multiplies its shards where they hold whole scale blocks: 128
    of k, of n, and for gradients of m; batch dimensions may be cut anywhere. An operand is gathered
    along a dimension where they do not, and, in FP8, along one whose mesh axis cuts another
    dimension of the product. Where k is sharded, partial sums are added, in f32 unless the recipe
    says otherwise.

    The backward pass keeps lhs quantised along m ("fp8gemm_lhs"; lhs itself with wgrad="bf16") and
    rhs ("fp8gemm_rhs"), named for jax.checkpoint_policies.save_only_these_names, as is the result
    ("fp8gemm_out").
    """
    op = "matmul"
    lhs, rhs = map(_checks.as_array, (lhs, rhs))
    is_scaled = isinstance(rhs, ScaledArray)
    check_unquantised(op, "lhs", lhs)
    _checks.check_min_ndim(op, "lhs", lhs, 1, "(..., m, k) or (k,)")
    check_weights(op, "rhs", rhs)
    if is_scaled:
        hint = "Map leading dimensions with jax.vmap."
        _checks.check_ndim(op, "rhs", rhs, 2, "(k, n)", hint=hint)
    else:
        _checks.check_min_ndim(op, "rhs", rhs, 1, "(..., k, n) or (k,)")
    _checks.check_same_k(op, lhs, lhs.shape[-1], rhs, rhs.shape[-2 if rhs.ndim > 1 else 0])
    weights = None if is_scaled else rhs
    spec = make_spec(op, lhs, weights, recipe, preferred_element_type, implementation)
    xla_precision = check_precision(op, precision, spec)
    check_out_sharding(op, out_sharding, (lhs, rhs))
    xla = partial(
        jnp.matmul,
        precision=xla_precision,
        preferred_element_type=spec.out_dtype,
        out_sharding=out_sharding,
    )
    if xla_precision is not None or not recipe.is_fp8:
        return xla(lhs, rhs.dequantize(lhs.dtype) if is_scaled else rhs)
    operands = jax.tree.map(jnp.asarray, (lhs, rhs))
    out_spec = partial(spec_of, xla, spec.out_dtype, *operands)
    return with_auto_axes(partial(_broadcast_product, spec), operands, out_spec)


def _broadcast_product(spec: MatmulSpec, lhs: jax.Array, rhs: Any) -> jax.Array:
    """The product with jnp.matmul's rules for vectors and batch dimensions."""
    if lhs.ndim == 1:
        return jnp.squeeze(_broadcast_product(spec, lhs[None], rhs), -1 if rhs.ndim == 1 else -2)
    if rhs.ndim == 1:
        return jnp.squeeze(_broadcast_product(spec, lhs, rhs[:, None]), -1)
    *lhs_batch, m, k = lhs.shape
    *rhs_batch, n = (*rhs.shape[:-2], rhs.shape[-1])
    try:
        batch = jnp.broadcast_shapes(tuple(lhs_batch), tuple(rhs_batch))
    except ValueError:
        raise ValueError(
            "matmul: batch dimensions of lhs and rhs must broadcast; got "
            f"lhs {_checks.short_type(lhs)}, rhs {_checks.short_type(rhs)}"
        ) from None
    if math.prod(rhs_batch) == 1:
        out = product(spec, lhs, rhs if rhs.ndim == 2 else rhs.reshape(k, n))
    elif math.prod(lhs_batch) == 1:
        rhs = rhs.reshape(math.prod(batch), k, n)
        out = jax.vmap(partial(product, spec), in_axes=(None, 0))(lhs.reshape(m, k), rhs)
    else:
        spread = lambda x: jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
        out = products(spec, spread(lhs), spread(rhs), len(batch))
    return out.reshape(*batch, m, n)


def products(spec: MatmulSpec, lhs: jax.Array, rhs: jax.Array, num_batch_dims: int) -> jax.Array:
    """A product for each element of the first dimensions, which a mesh may cut one by one."""
    multiply = partial(product, spec)
    for _ in range(num_batch_dims):
        multiply = jax.vmap(multiply)
    return multiply(lhs, rhs)


@jax.named_scope("fp8gemm_matmul")
def product(spec: MatmulSpec, lhs: jax.Array, rhs: jax.Array | ScaledArray) -> jax.Array:
    """lhs (..., m, k) times rhs (k, n)."""
    return _product(spec, *match_varying(lhs, without_gradient("matmul", "rhs", rhs)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: MatmulSpec, lhs: jax.Array, rhs: jax.Array | ScaledArray) -> jax.Array:
    rows = quantize(lhs, **quantize_args(spec, spec.recipe.fwd))
    return _gemm_as(spec, spec.out_dtype, rows, transposed(spec, rhs))


def _product_fwd(spec: MatmulSpec, lhs: jax.Array, rhs: Any) -> tuple[jax.Array, Any]:
    """Quantises for both passes; under jit, what no wanted cotangent reads is not computed."""
    args = quantize_args(spec, spec.recipe.fwd)
    if spec.rhs_dtype is not None and spec.recipe.wgrad == "fp8":
        rows, lhs_residual = rows_and_columns(_with_whole_blocks(lhs), **args)
    else:
        rows, lhs_residual = quantize(lhs, **args), None if spec.rhs_dtype is None else lhs
    rhs_residual, rhs_transposed = both_ways(spec, spec.recipe.fwd, rhs)
    out = _gemm_as(spec, spec.out_dtype, rows, rhs_transposed)
    out = out.reshape(*lhs.shape[:-1], out.shape[-1])
    residuals = name_residual("lhs", lhs_residual), name_residual("rhs", rhs_residual)
    return name_residual("out", out), residuals


def _product_bwd(spec: MatmulSpec, residuals: Any, dout: jax.Array) -> tuple[Any, Any]:
    lhs, rhs = residuals
    args = quantize_args(spec, spec.recipe.bwd)
    is_fp8_wgrad = spec.rhs_dtype is not None and spec.recipe.wgrad == "fp8"
    if is_fp8_wgrad:
        rows, columns = rows_and_columns(_with_whole_blocks(dout), **args)
    else:
        rows, columns = quantize(dout, **args), None
    with jax.named_scope("dlhs"):
        dlhs = _gemm_as(spec, spec.lhs_dtype, rows, rhs)
        dlhs = dlhs.reshape(*dout.shape[:-1], dlhs.shape[-1])
    if spec.rhs_dtype is None:
        return dlhs, None
    with jax.named_scope("drhs"):
        if columns is None:
            return dlhs, _bf16_wgrad(lhs, dout).astype(spec.rhs_dtype)
        return dlhs, _gemm_as(spec, spec.rhs_dtype, lhs, columns)


_product.defvjp(_product_fwd, _product_bwd)


def _with_whole_blocks(x: jax.Array) -> jax.Array:
    """`x` (..., m, k), of whose leading dimensions as many are folded into m as give it whole scale
    blocks: those along m are then the same as if all were folded. All are where none give it."""
    *batch, m, k = x.shape
    while batch and m % _checks.SCALE_BLOCK:
        m *= batch.pop()
    return x.reshape(*batch, m, k)


def _gemm_as(spec: MatmulSpec, dtype: Any, lhs: ScaledArray, rhs: ScaledArray) -> jax.Array:
    """gemm with a result of any float dtype: f16 by way of f32."""
    how: dict[str, Any] = dict(implementation=spec.implementation, reduce_dtype=spec.reduce_dtype)
    return gemm(lhs, rhs, kernel_dtype(dtype), **how).astype(dtype)


def _bf16_wgrad(lhs: jax.Array, dout: jax.Array) -> jax.Array:
    lhs, dout = lhs.astype(jnp.bfloat16), dout.astype(jnp.bfloat16)
    rows = tuple(range(lhs.ndim - 1))
    contract_m = ((rows, rows), ((), ()))
    return lax.dot_general(lhs, dout, contract_m, preferred_element_type=jnp.float32)
