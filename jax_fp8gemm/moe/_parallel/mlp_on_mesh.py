"""expert_mlp_on_mesh: expert_mlp for arrays that a mesh cuts, outside any shard_map over its axes.

Weights may be sharded along mesh axes that are not the experts', too. They are quantised where they
live and gathered as FP8, once for both passes. Their gradients are added in reduce_dtype.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import type_of
from jax_fp8gemm._primitives.whole import whole_matrices
from jax_fp8gemm._sharding.manual_axes import match_varying
from jax_fp8gemm.moe._biases import as_biases
from jax_fp8gemm.moe._mlp_products import Experts, transposed_weights, weights_both_ways
from jax_fp8gemm.moe._operands import Operands
from jax_fp8gemm.moe._parallel.expert_spec import ExpertSpec
from jax_fp8gemm.moe._parallel.layout import MeshLayout
from jax_fp8gemm.moe._parallel.mlp import Kept, backward, forward
from jax_fp8gemm.moe._parallel.mlp_backward import Gradients

# The sharding of w_gate_up and of w_down; None for a ScaledArray, which has no gradient.
Shardings: TypeAlias = tuple[NamedSharding | None, ...]


def expert_mlp_on_mesh(spec: ExpertSpec, layout: MeshLayout, operands: Operands) -> jax.Array:
    """Runs expert_mlp on the tokens and experts of all devices; `spec` is that of one device."""
    x, indices, weights, w_gate_up, w_down, biases = operands
    shardings = tuple(
        None if isinstance(w, ScaledArray) else type_of(w).sharding for w in (w_gate_up, w_down)
    )
    x, indices, weights = (layout.place(y, layout.tokens) for y in (x, indices, weights))
    operands = Operands(*match_varying(x, indices, weights, w_gate_up, w_down, biases))
    return _expert_mlp(spec, layout, shardings, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _expert_mlp(
    spec: ExpertSpec, layout: MeshLayout, shardings: Shardings, operands: Operands
) -> jax.Array:
    *_, w_gate_up, w_down, biases = operands
    w = transposed_weights(spec.products, w_gate_up, w_down, biases)
    return _forward(spec, layout, operands, w, is_differentiated=False)[0]


def _forward(
    spec: ExpertSpec,
    layout: MeshLayout,
    operands: Operands,
    w: Experts,
    *,
    is_differentiated: bool,
) -> tuple[jax.Array, Kept]:
    """Runs `forward` on each device, with transposed weights."""
    implementation = spec.products.into.implementation
    gate_up, down = (whole_matrices(x, implementation) for x in (w.gate_up, w.down))
    x, indices, weights, *_ = operands
    tokens, experts = layout.tokens, layout.experts
    in_specs = tokens, tokens, tokens, experts
    run = partial(forward, spec, is_differentiated=is_differentiated)
    # Without check_vma, because each device keeps residuals of its own even if they do not vary.
    run_on_mesh = layout.map(run, in_specs, tokens, check_vma=False)
    return run_on_mesh(x, indices, weights, Experts(gate_up, down, w.biases))


def _fwd(
    spec: ExpertSpec, layout: MeshLayout, shardings: Shardings, operands: Operands
) -> tuple[jax.Array, tuple[Kept, Experts]]:
    *_, w_gate_up, w_down, biases = operands
    w, transposed = weights_both_ways(spec.products, w_gate_up, w_down, biases)
    out, kept = _forward(spec, layout, operands, transposed, is_differentiated=True)
    return out, (kept, w)


def _bwd(
    spec: ExpertSpec,
    layout: MeshLayout,
    shardings: Shardings,
    residuals: tuple[Kept, Experts],
    dout: jax.Array,
) -> tuple[Operands]:
    summed = tuple(name for name in layout.token_axes if name not in layout.expert_axes)
    partial_spec = _with_partial_sums(spec) if summed else spec
    kept, w = residuals
    dims = [_scattered_dim(layout, summed, weight.shape) for weight in (w.gate_up, w.down)]

    def run(kept: Kept, w: Experts, dout: jax.Array) -> Gradients:
        gradients = backward(partial_spec, kept, w, dout)
        if not summed:
            return gradients
        drhs = gradients.w_gate_up, gradients.w_down
        both = spec.products.into, spec.products.down
        dw_gate_up, dw_down = (
            None if dw is None else _sum(dw, summed, dim).astype(product.rhs_dtype)
            for dw, dim, product in zip(drhs, dims, both, strict=True)
        )
        dbiases = jax.tree.map(lambda b: lax.psum(b, summed), gradients.biases)
        return gradients._replace(w_gate_up=dw_gate_up, w_down=dw_down, biases=dbiases)

    tokens, experts = layout.tokens, layout.experts
    grad_specs = (_grad_spec(layout.expert_axes, summed, dim) for dim in dims)
    out_specs = Gradients._make((tokens, tokens, *grad_specs, experts))
    run_on_mesh = layout.map(run, (tokens, experts, tokens), out_specs, check_vma=False)
    gradients = run_on_mesh(kept, w, dout)
    drhs = gradients.w_gate_up, gradients.w_down
    drhs = (_reshard(dw, sharding) for dw, sharding in zip(drhs, shardings, strict=True))
    drhs = spec.products.gradients_of_weights(*drhs)
    dbiases = as_biases(gradients.biases, w.biases)
    return (Operands._make((gradients.x, None, gradients.weights, *drhs, dbiases)),)


_expert_mlp.defvjp(_fwd, _bwd)


def _with_partial_sums(spec: ExpertSpec) -> ExpertSpec:
    """Returns `spec` with gradients of weights in the dtype in which devices add them."""
    into, down = (
        product if product.rhs_dtype is None else replace(product, rhs_dtype=product.reduce_dtype)
        for product in (spec.products.into, spec.products.down)
    )
    return replace(spec, products=spec.products._replace(into=into, down=down))


def _scattered_dim(layout: MeshLayout, axes: tuple[str, ...], shape: Any) -> int | None:
    """Returns the dimension of a weight (g, d, f) along which its gradient is scattered, or None.

    A sum over `axes` that scatters its result moves half the bytes of one that every device gets.
    """
    parts = math.prod(layout.mesh.shape[name] for name in axes)
    return next((dim for dim in (1, 2) if parts > 1 and shape[dim] % parts == 0), None)


def _sum(dw: jax.Array, axes: tuple[str, ...], dim: int | None) -> jax.Array:
    """Adds dw over `axes`, and scatters the sum along `dim` if that is not None."""
    if dim is None:
        return lax.psum(dw, axes)
    return lax.psum_scatter(dw, axes, scatter_dimension=dim, tiled=True)


def _grad_spec(
    expert_axes: tuple[str, ...], summed: tuple[str, ...], dim: int | None
) -> PartitionSpec:
    """Returns how a gradient is cut after `_sum`."""
    cut = [expert_axes, None, None]
    if dim is not None:
        cut[dim] = summed
    return PartitionSpec(*cut)


def _reshard(x: jax.Array | None, sharding: NamedSharding | None) -> jax.Array | None:
    """Returns the gradient x as its weight is sharded; None for weights that have no gradient."""
    is_moved = sharding is not None and sharding.mesh.explicit_axes
    return jax.sharding.reshard(x, sharding) if is_moved else x
