"""Expert-parallel layers under jit: what is cut how, and weights that are gathered as FP8.

Along the axes of the mesh that are not the experts', weights may be sharded too: they are then
quantised where they live, gathered as FP8, and their gradients summed in the recipe's reduce_dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec
from jax_fp8gemm._sharding.manual_axes import match_varying
from jax_fp8gemm._sharding.rule import axes_of
from jax_fp8gemm.moe._mlp_products import weights_both_ways
from jax_fp8gemm.moe._mlp_specs import Specs
from jax_fp8gemm.moe._parallel.mlp import ExpertSpec, backward, forward


@dataclass(frozen=True)
class MeshLayout:
    """How the mesh cuts the layer's arrays, all along their first dimension.

    Attributes:
      mesh: of the caller.
      token_axes: those that cut the tokens: all that are not manual.
      expert_axes: those of them that cut the experts.
    """

    mesh: Any
    token_axes: tuple[str, ...]
    expert_axes: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        """Into how many parts the tokens are cut."""
        return math.prod(self.mesh.shape[name] for name in self.token_axes)

    @property
    def num_expert_devices(self) -> int:
        """Into how many the experts are cut."""
        return math.prod(self.mesh.shape[name] for name in self.expert_axes)

    @property
    def tokens(self) -> PartitionSpec:
        """Of an array of tokens, and of anything that each device has of its own."""
        return PartitionSpec(self.token_axes)

    @property
    def experts(self) -> PartitionSpec:
        """Of an array of experts."""
        return PartitionSpec(self.expert_axes)

    def map(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool = True
    ) -> Callable[..., Any]:
        """`function` on each device's shards of operands, which are moved there first."""
        sharded = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.token_axes),
            check_vma=check_vma,
        )

        def run(*operands):
            moved = [
                jax.tree.map(partial(self.place, spec=spec), operand)
                for spec, operand in zip(in_specs, operands, strict=True)
            ]
            # NOTE: without check_vma nothing varies over the axes of a shard_map around this one.
            outer = jax.tree.leaves(moved)
            return jax.tree.map(lambda y: match_varying(y, *outer)[0], sharded(*moved))

        return run

    def place(self, x: Any, spec: PartitionSpec) -> jax.Array:
        """`x` as `spec` says over the Explicit axes; XLA moves it along the others."""
        x = jnp.asarray(x)
        explicit = set(self.mesh.abstract_mesh.explicit_axes)
        if not explicit:
            return x
        dims = [tuple(name for name in axes_of(e) if name in explicit) or None for e in spec]
        return jax.sharding.reshard(x, NamedSharding(self.mesh, PartitionSpec(*dims)))


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
