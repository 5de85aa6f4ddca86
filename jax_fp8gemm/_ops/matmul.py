"""matmul: jnp.matmul in FP8, with operands and results in bf16, f16 or f32.

_ops/product.py has the formulas of the product and of its gradients.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.methods import define_method
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.contract import contract
from jax_fp8gemm._ops.product import product, products
from jax_fp8gemm._ops.product_spec import ProductSpec, Weights, check_static_args, out_spec_of
from jax_fp8gemm._ops.weights import check_weights, unquantised
from jax_fp8gemm._sharding.explicit_axes import gather_over, reshape, reshard, reshard_first
from jax_fp8gemm._sharding.manual_axes import settle

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@naming_devices
def matmul(
    lhs: Float[Array, "*batch m k"],
    rhs: Float[Array, "*batch k n"] | QuantizedWeight | ScaledArray,
    *,
    recipe: Recipe | str = DEEPSEEK_V3,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: Implementation = None,
    out_sharding: Any = None,
) -> Float[Array, "*batch m n"]:
    """Multiplies arrays as jnp.matmul does, in FP8 with f32 accumulation.

    m, n and k may be any numbers. Batch dimensions broadcast; those of lhs alone are folded into m.
    The product is differentiable once, in reverse mode. Its formats and scale blocks are those of
    the DeepSeek-V3 report, section 3.3, unless the recipe says otherwise.

    Args:
      lhs: (..., m, k) or (k,), bf16, f16 or f32. Integers are cast to the dtype of rhs, if that is
        one of these. Without x64, f64 of NumPy becomes f32, as in JAX.
      rhs: (..., k, n) or (k,), like lhs. Or a ScaledArray (k, n) with block (128, 128), quantised
        once for many products. The product uses its format, and it has no gradient. The product
        reads `transposed`, and the gradient of lhs reads `values`. Either is made from the other
        where it is not stored. So quantise with_transpose="only" if no gradient is taken. Or a
        QuantizedWeight of (..., k, n), which has a gradient.
      recipe: the formats and scale blocks: DEEPSEEK_V3, HYBRID, BF16, the name of one of these, as
        "hybrid", or another Recipe.
      precision: None or DEFAULT means FP8. HIGH or HIGHEST, for either operand, means a plain XLA
        dot at that precision; so does a DotAlgorithmPreset of bf16, f16, tf32 or f32,
        or its name.
        `jax.default_matmul_precision` has no effect.
      preferred_element_type: the dtype of the result, bf16, f16 or f32. The default is the dtype
        of both operands, or f32 if they differ. A weakly typed one counts as any other, as in lax.
      implementation: None runs the kernels where they can run, and elsewhere the reference, with
        one warning. "cuda" runs the kernels or raises. "xla" runs the reference.
        "emulate" gives the bits of the kernels on any machine, slowly.
      out_sharding: the sharding of the result over the operands' Explicit mesh axes, as in
        jnp.matmul. It is needed if one of them cuts k. A PartitionSpec needs the mesh of
        jax.set_mesh.
    Returns:
      (..., m, n) array. Gradients have the dtypes of their operands.
    Raises:
      TypeError: a dtype is wrong, or lhs and rhs differ in k.
      ValueError: another shape, precision, implementation, scale block or out_sharding is wrong.
      NotImplementedError: a second derivative is taken.
      RuntimeError: implementation="cuda", and the kernels cannot run.

    On a mesh, under jit, each device multiplies its shards. A shard must hold whole scale blocks:
    multiples of 128 of k and n, and for gradients of m. Otherwise the operand is gathered along
    that dimension. In FP8 it is also gathered along a dimension whose mesh axis cuts another
    dimension of the product. Batch dimensions may be cut anywhere. Where k is sharded, the devices
    add partial sums, in f32 unless the recipe says otherwise.

    The backward pass keeps lhs quantised along m, or lhs itself with wgrad="bf16", under the name
    "fp8gemm_lhs", and rhs under "fp8gemm_rhs". The result is named "fp8gemm_out". The names are
    for jax.checkpoint_policies.save_only_these_names.
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
        rhs = rhs.dequantize(lhs.dtype) if isinstance(rhs, ScaledArray) else unquantised(rhs)
        if not spec.is_exact:
            return xla(lhs, rhs)
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


define_method(matmul)


def _check_batch(op: str, lhs: Any, rhs: Any) -> None:
    got = f"lhs {checks.short_type(lhs)}, rhs {checks.short_type(rhs)}"
    try:
        batch: Any = jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    except ValueError:
        raise ValueError(
            f"{op}: batch dimensions of lhs and rhs must broadcast; got {got}"
        ) from None
    checks.check_count(op, "the number of products", math.prod(batch), got)


def _broadcast_product(
    spec: ProductSpec, lhs: jax.Array, rhs: Weights, out_spec: PartitionSpec | None
) -> jax.Array:
    """Multiplies with jnp.matmul's rules for batch dimensions."""
    *lhs_batch, m, k = lhs.shape
    *rhs_batch, n = (*rhs.shape[:-2], rhs.shape[-1])
    batch = jnp.broadcast_shapes(tuple(lhs_batch), tuple(rhs_batch))
    last = lambda n: None if out_spec is None else PartitionSpec(*out_spec.partitions[-n:])
    if isinstance(rhs, ScaledArray):
        out = product(spec, lhs, rhs, last(lhs.ndim))
    elif math.prod(rhs_batch) == 1:
        matrix = jax.tree.map(lambda w: reshape(w, w.shape[-2:]), rhs)
        out = product(spec, lhs, matrix, last(lhs.ndim))
    elif math.prod(lhs_batch) == 1:
        if out_spec is not None:
            of_batch = PartitionSpec(*out_spec.partitions[: len(batch)])
            in_batch = lambda w: reshape(w, (*batch, *w.shape[-2:]))
            rhs = jax.tree.map(lambda w: reshard_first(in_batch(w), of_batch), rhs)
            lhs = gather_over(lhs, of_batch)
        rhs = jax.tree.map(lambda w: reshape(w, (math.prod(batch), *w.shape[-2:])), rhs)
        multiply = jax.vmap(partial(product, spec, out_spec=last(2)), in_axes=(None, 0))
        out = multiply(reshape(lhs, (m, k)), rhs)
    else:
        spread = lambda x: jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
        lhs, rhs = spread(lhs), jax.tree.map(spread, rhs)
        out = products(spec, lhs, rhs, len(batch), last(len(batch) + 2))
    return reshape(out, (*batch, m, n))
