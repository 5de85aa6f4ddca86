"""moe_layer with an expert_axis: the experts of a mixture spread along a mesh axis."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._ops.weights import without_gradient
from jax_fp8gemm._sharding.manual_axes import match_varying
from jax_fp8gemm.moe._local_layer import local_layer
from jax_fp8gemm.moe._options import LayerOptions
from jax_fp8gemm.moe._parallel.exchange import Name, make_exchange
from jax_fp8gemm.moe._parallel.expert_spec import expert_spec
from jax_fp8gemm.moe._parallel.layout import MeshLayout
from jax_fp8gemm.moe._parallel.mlp import expert_mlp
from jax_fp8gemm.moe._parallel.mlp_on_mesh import expert_mlp_on_mesh
from jax_fp8gemm.moe._parallel.unquantised import unquantised_exchange


def expert_parallel(
    op: str,
    options: LayerOptions,
    names: tuple[str, ...],
    exchange: Name | None,
    operands: tuple[Any, ...],
) -> jax.Array:
    """The layer on one device's tokens and experts, in a shard_map over the axes `names`.

    operands: x (t, d), router, w_gate_up, w_down.
    """
    x, router, w_gate_up, w_down = operands
    experts = w_gate_up.shape[0]
    num_experts = experts * lax.axis_size(names)
    indices, weights = options.choose(op, router, num_experts)
    if x.size == 0:
        return jnp.zeros_like(x)
    axis = names[0] if len(names) == 1 else names
    w_gate_up = without_gradient(op, "w_gate_up", w_gate_up)
    w_down = without_gradient(op, "w_down", w_down)
    # The tokens of a device differ, whether or not the operands do: as the device's number.
    me = lax.axis_index(axis)
    operands = match_varying(x, weights, w_gate_up, w_down, indices, me)[:-1]
    sizes: dict[str, Any] = dict(
        size=lax.axis_size(axis), tokens=x.shape[0], top_k=indices.shape[1]
    )
    most = options.capacity(indices.size, num_experts)
    if options.recipe.is_fused:
        how: dict[str, Any] = dict(exchange=exchange, capacity=most, experts=experts) | sizes
        return expert_mlp(expert_spec(op, options, x, w_gate_up, w_down, axis, **how), *operands)
    # Derivatives pass through the exchange here, and it through one turn only.
    max_slots = x.shape[0] if most is None else experts * most
    sender = make_exchange(exchange, axis, **sizes, max_slots=max_slots)
    max_rows = None if most is None else sizes["size"] * experts * most
    layer = partial(local_layer, options, max_rows=max_rows)
    return unquantised_exchange(sender, layer, *operands)


# NOTE: jitted for calls outside jit, where a shard_map is compiled anew with each new function that
# it maps. What is jitted is found by what is static about it. Not inlined: jax 0.10 would then run
# the derivative op by op.
@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def expert_parallel_on_mesh(
    op: str,
    options: LayerOptions,
    layout: MeshLayout,
    exchange: Name | None,
    operands: tuple[Any, ...],
) -> jax.Array:
    """The layer on all tokens and experts.

    operands: x (m, d), router, w_gate_up, w_down.
    """
    names = layout.expert_axes
    if not options.recipe.is_fused:
        specs = layout.tokens, layout.tokens, layout.experts, layout.experts
        on_device = lambda *parts: expert_parallel(op, options, names, exchange, parts)
        return layout.map(on_device, specs, layout.tokens)(*operands)
    x, router, w_gate_up, w_down = operands
    w_gate_up = without_gradient(op, "w_gate_up", w_gate_up)
    w_down = without_gradient(op, "w_down", w_down)
    num_experts = w_gate_up.shape[0]
    choose = lambda y: options.choose(op, y, num_experts)
    indices, weights = layout.map(choose, (layout.tokens,), layout.tokens)(router)
    if x.size == 0:
        return x
    spec = expert_spec(
        op,
        options,
        x,
        w_gate_up,
        w_down,
        names[0] if len(names) == 1 else names,
        size=layout.num_expert_devices,
        tokens=x.shape[0] // layout.num_devices,
        top_k=indices.shape[1],
        experts=num_experts // layout.num_expert_devices,
        exchange=exchange,
        capacity=options.capacity(indices.size // layout.num_devices, num_experts),
    )
    return expert_mlp_on_mesh(spec, layout, x, weights, w_gate_up, w_down, indices)
