"""matmul: bf16, f16 or f32 in and out, FP8 inside, with its own derivatives (_ops/product.py)."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.contract import contract
from jax_fp8gemm._ops.product import product, products
from jax_fp8gemm._ops.product_spec import ProductSpec, Weights, check_static_args, out_spec_of
from jax_fp8gemm._ops.weights import check_weights
from jax_fp8gemm._sharding.explicit_axes import reshape, reshard
from jax_fp8gemm._sharding.manual_axes import settle

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@naming_devices
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
      lhs: (..., m, k) or (k,), bf16, f16 or f32; integers where rhs holds floats, and then cast to
        their dtype. Without x64, f64 of NumPy is f32, as in JAX.
      rhs: (..., k, n) or (k,), likewise; or a ScaledArray (k, n) with block (128, 128),
        quantised once for many products: its own format is used, and it has no gradient. Give it
        `transposed` (quantize with_transpose=True), which is what the product reads.
      recipe: formats and scale blocks; DEEPSEEK_V3, HYBRID, BF16 or another.
      precision: None or DEFAULT: FP8. HIGH or HIGHEST, for either operand, or a DotAlgorithmPreset
        of bf16, f16, tf32 or f32, or its name: a plain XLA dot at that precision, without FP8.
        `jax.default_matmul_precision` has no say: calling this function asks for FP8.
      preferred_element_type: dtype of the result, bf16, f16 or f32; default that of both operands,
        f32 where they differ. Weakly typed operands count as others, as in lax.dot_general.
      implementation: None, the kernels where they can run and the reference elsewhere, with one
        warning; "cuda", the kernels or an error; "xla", the reference.
      out_sharding: sharding of the result over the operands' Explicit mesh axes, as in jnp.matmul:
        needed where k is sharded over one. A PartitionSpec needs the mesh of jax.set_mesh.
    Returns:
      (..., m, n) array. Gradients have the dtypes of their operands.
    Raises:
      TypeError: a dtype, lhs and rhs with another k each.
      ValueError: other shapes, precision, implementation, scale block, out_sharding.
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
    lhs, rhs = arrays.match_floats(*map(arrays.as_array, (lhs, rhs)))
    is_scaled = isinstance(rhs, ScaledArray)
    check_unquantised(op, "lhs", lhs)
    checks.check_min_ndim(op, "lhs", lhs, 1, "(..., m, k) or (k,)")
    check_weights(op, "rhs", rhs)
    if is_scaled:
        hint = "Map leading dimensions with jax.vmap."
        checks.check_ndim(op, "rhs", rhs, 2, "(k, n)", hint=hint)
    else:
        checks.check_min_ndim(op, "rhs", rhs, 1, "(..., k, n) or (k,)")
    rhs_k = rhs.shape[-2 if rhs.ndim > 1 else 0]
    checks.check_same_k(op, lhs, lhs.shape[-1], rhs, rhs_k, error=TypeError)
    _check_batch(op, lhs, rhs)
    spec = check_static_args(
        op, lhs, rhs, recipe, precision, preferred_element_type, implementation, out_sharding
    )
    xla = partial(jnp.matmul, **spec.xla_args(out_sharding))
    if not spec.is_fp8:
        return xla(lhs, rhs.dequantize(lhs.dtype) if is_scaled else rhs)
    lhs, rhs = jax.tree.map(jnp.asarray, (lhs, rhs))
    out_spec = out_spec_of(xla, spec.out_dtype, lhs, rhs)
    if not isinstance(rhs, ScaledArray) and rhs.ndim <= 2:
        dims = ((lhs.ndim - 1,), (0,)), ((), ())
        return contract(op, spec, dims, lhs, rhs, out_spec)
    lhs, rhs = jax.tree.map(partial(settle, op), (lhs, rhs))
    if lhs.ndim > 1:
        return reshard(_broadcast_product(spec, lhs, rhs, out_spec), out_spec)
    row_spec = None
    if out_spec is not None:
        *batch, n = out_spec.partitions
        row_spec = PartitionSpec(*batch, None, n)
    out = _broadcast_product(spec, lhs[None], rhs, row_spec)
    return reshard(jnp.squeeze(out, -2), out_spec)


def _check_batch(op: str, lhs: Any, rhs: Any) -> None:
    got = f"lhs {checks.short_type(lhs)}, rhs {checks.short_type(rhs)}"
    try:
        batch = np.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    except ValueError:
        raise ValueError(
            f"{op}: batch dimensions of lhs and rhs must broadcast; got {got}"
        ) from None
    checks.check_count(op, "the number of products", math.prod(batch), got)


def _broadcast_product(
    spec: ProductSpec, lhs: jax.Array, rhs: Weights, out_spec: PartitionSpec | None
) -> jax.Array:
    """The product with jnp.matmul's rules for batch dimensions."""
    *lhs_batch, m, k = lhs.shape
    *rhs_batch, n = (*rhs.shape[:-2], rhs.shape[-1])
    batch = jnp.broadcast_shapes(tuple(lhs_batch), tuple(rhs_batch))
    last = lambda n: None if out_spec is None else PartitionSpec(*out_spec.partitions[-n:])
    if isinstance(rhs, ScaledArray):
        out = product(spec, lhs, rhs, last(lhs.ndim))
    elif math.prod(rhs_batch) == 1:
        out = product(spec, lhs, reshape(rhs, (k, n)), last(lhs.ndim))
    elif math.prod(lhs_batch) == 1:
        rhs = reshape(rhs, (math.prod(batch), k, n))
        multiply = jax.vmap(partial(product, spec, out_spec=last(2)), in_axes=(None, 0))
        out = multiply(reshape(lhs, (m, k)), rhs)
    else:
        spread = lambda x: jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
        out = products(spec, spread(lhs), spread(rhs), len(batch), last(len(batch) + 2))
    return reshape(out, (*batch, m, n))
