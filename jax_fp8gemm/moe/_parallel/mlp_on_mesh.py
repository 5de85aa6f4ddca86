"""Expert-parallel layers under jit: what is cut how, and weights that are gathered as FP8.

Along the axes of the mesh that are not the experts', weights may be sharded too: they are then
quantised where they live, gathered as FP8, and their gradients summed in the recipe's reduce_dtype.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec
from jax_fp8gemm._sharding.manual_axes import match_varying
from jax_fp8gemm.moe._mlp_products import weights_both_ways
from jax_fp8gemm.moe._mlp_specs import Specs
from jax_fp8gemm.moe._parallel.expert_spec import ExpertSpec
from jax_fp8gemm.moe._parallel.layout import MeshLayout
from jax_fp8gemm.moe._parallel.mlp import backward, forward


def expert_mlp_on_mesh(
    spec: ExpertSpec, layout: MeshLayout, x, weights, w_gate_up: Any, w_down: Any, indices
) -> jax.Array:
    """expert_mlp of the tokens and experts of all devices; `spec` is that of one."""
    shardings = tuple(
        None if isinstance(w, ScaledArray) else jax.typeof(w).sharding for w in (w_gate_up, w_down)
    )
    x, weights, indices = (layout.place(y, layout.tokens) for y in (x, weights, indices))
    x, weights, w_gate_up, w_down, indices = match_varying(x, weights, w_gate_up, w_down, indices)
    return _expert_mlp(spec, layout, shardings, x, weights, w_gate_up, w_down, indices)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _expert_mlp(spec, layout, shardings, x, weights, w_gate_up, w_down, indices) -> jax.Array:
    return _fwd(spec, layout, shardings, x, weights, w_gate_up, w_down, indices)[0]


def _fwd(spec: ExpertSpec, layout: MeshLayout, shardings, x, weights, w_gate_up, w_down, indices):
    kept, transposed = weights_both_ways(spec.products, w_gate_up, w_down)
    tokens, experts = layout.tokens, layout.experts
    # check_vma=False: residuals are each device's own, whether or not they differ.
    run = layout.map(
        partial(forward, spec), (tokens, tokens, experts, tokens), tokens, check_vma=False
    )
    out, residuals = run(x, weights, transposed, indices)
    return out, (residuals, kept)


def _bwd(spec: ExpertSpec, layout: MeshLayout, shardings, residuals: Any, dout: jax.Array):
    tokens, experts = layout.tokens, layout.experts
    summed = tuple(name for name in layout.token_axes if name not in layout.expert_axes)
    products = spec.products
    if summed:
        spec = replace(spec, products=Specs(*map(_with_partial_sums, products)))

    kept, w = residuals
    dims = [_scattered_dim(layout, summed, weight.shape) for weight in w]

    def run(residuals, w, dout):
        dx, dweights, *drhs = backward(spec, residuals, w, dout)
        total = [
            dw if dw is None else _sum(dw, summed, dim).astype(product.rhs_dtype)
            for dw, dim, product in zip(drhs, dims, products, strict=True)
        ]
        return dx, dweights, *(total if summed else drhs)

    grad_specs = [_grad_spec(layout.expert_axes, summed, dim) for dim in dims]
    out_specs = (tokens, tokens, *grad_specs)
    run_on_mesh = layout.map(run, (tokens, experts, tokens), out_specs, check_vma=False)
    dx, dweights, *drhs = run_on_mesh(kept, w, dout)
    drhs = [_reshard(dw, sharding) for dw, sharding in zip(drhs, shardings, strict=True)]
    return dx, dweights, *drhs, None


_expert_mlp.defvjp(_fwd, _bwd)


def _with_partial_sums(product: ProductSpec) -> ProductSpec:
    """The product with gradients of rhs in the dtype in which devices add them."""
    has_gradient = product.rhs_dtype is not None
    return replace(product, rhs_dtype=product.reduce_dtype) if has_gradient else product


def _scattered_dim(layout: MeshLayout, axes: tuple[str, ...], shape: Any) -> int | None:
    """The dimension of a weight (g, d, f) along which its gradients are scattered as they are added
    over `axes`: half the bytes of a sum that every device gets, whatever XLA then makes of it."""
    parts = math.prod(layout.mesh.shape[name] for name in axes)
    return next((dim for dim in (1, 2) if parts > 1 and shape[dim] % parts == 0), None)


def _sum(dw: jax.Array, axes: tuple[str, ...], dim: int | None) -> jax.Array:
    if dim is None:
        return lax.psum(dw, axes)
    return lax.psum_scatter(dw, axes, scatter_dimension=dim, tiled=True)


def _grad_spec(
    expert_axes: tuple[str, ...], summed: tuple[str, ...], dim: int | None
) -> PartitionSpec:
    """Of a gradient that `_sum` has added."""
    cut = [expert_axes, None, None]
    if dim is not None:
        cut[dim] = summed
    return PartitionSpec(*cut)


def _reshard(x: Any, sharding: Any) -> Any:
    """`x` as a weight is sharded; None: that of a ScaledArray, which has no gradient."""
    is_moved = sharding is not None and sharding.mesh.explicit_axes
    return jax.sharding.reshard(x, sharding) if is_moved else x
