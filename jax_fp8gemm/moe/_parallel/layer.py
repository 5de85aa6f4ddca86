"""moe_layer with an expert_axis: the experts of a mixture spread along a mesh axis."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data import checks
from jax_fp8gemm._ops.weights import without_gradient
from jax_fp8gemm._sharding.manual_axes import match_varying
from jax_fp8gemm.moe._local_layer import local_layer
from jax_fp8gemm.moe._mlp_specs import check_num_experts, make_specs
from jax_fp8gemm.moe._options import LayerOptions
from jax_fp8gemm.moe._parallel.exchange import NAMES, AxisName, Exchange, Name, make_exchange
from jax_fp8gemm.moe._parallel.mesh import MeshLayout, expert_mlp_on_mesh
from jax_fp8gemm.moe._parallel.mlp import ExpertSpec, expert_mlp
from jax_fp8gemm.moe._parallel.unquantised import unquantised_exchange

_HEADROOM = 1.25  # rows of a turn over those that evenly spread choices make
_ROW_UNIT = 128
_MIN_ROWS = 4096  # of a turn, where there are as many


def axis_names(op: str, expert_axis: Any, exchange: Any) -> tuple[str, ...]:
    """The mesh axes that `expert_axis` names."""
    names = (expert_axis,) if isinstance(expert_axis, str) else expert_axis
    if not isinstance(names, tuple) or not names or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"{op}: expert_axis must be the name of a mesh axis, or a tuple of names; "
            f"got {checks.short_repr(expert_axis)}"
        )
    if len(set(names)) != len(names):
        raise ValueError(
            f"{op}: expert_axis must name each mesh axis once; got {checks.short_repr(expert_axis)}"
        )
    if not isinstance(exchange, str | None) or exchange not in (None, *NAMES):
        raise ValueError(
            f"{op}: exchange must be None or of {', '.join(NAMES)}; "
            f"got {checks.short_repr(exchange)}"
        )
    return names


def is_manual(names: tuple[str, ...]) -> bool:
    """Whether the caller is inside a shard_map over these axes."""
    return set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def lay_out(op: str, operands: tuple[Any, ...], names: tuple[str, ...], mesh: Any) -> MeshLayout:
    """How a mesh cuts x (m, d), the router and the weights; raises where it cannot.

    Tokens are cut along all axes of the mesh that the caller is not in a shard_map over already;
    experts along those of `names`.
    """
    x, _, *weights = operands
    mesh = _mesh_of(op, jax.tree.leaves(operands), mesh)
    if unknown := sorted(set(names) - set(mesh.axis_names)):
        raise ValueError(
            f"{op}: expert_axis must name axes of the mesh, {', '.join(mesh.axis_names)}; "
            f"got {', '.join(unknown)}"
        )
    token_axes = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
    if manual := sorted(set(names) - set(token_axes)):
        raise ValueError(
            f"{op}: expert_axis must name axes that all are, or all are not, those of a shard_map "
            f"around the call; got {', '.join(names)}, of which {', '.join(manual)} are"
        )
    layout = MeshLayout(mesh, token_axes, names)
    if x.shape[0] % layout.num_devices:
        raise ValueError(
            f"{op}: the tokens must divide evenly among the {layout.num_devices} devices of the "
            f"mesh axes {', '.join(token_axes)}; got {x.shape[0]} tokens. Pad x, or call in a "
            "shard_map."
        )
    if weights[0].shape[0] % layout.num_expert_devices:
        raise ValueError(
            f"{op}: the experts must divide evenly among the {layout.num_expert_devices} devices "
            f"of expert_axis; got {weights[0].shape[0]}. Add experts that no token chooses, or put "
            "expert_axis on another mesh axis."
        )
    return layout


def _mesh_of(op: str, arrays: list[Any], mesh: Any) -> Any:
    if mesh is not None:
        return mesh
    current = jax.sharding.get_abstract_mesh()
    if not current.empty:
        return current
    for x in arrays:
        on = getattr(jax.typeof(x).sharding, "mesh", None)
        if on is not None and not on.empty:
            return on
    raise ValueError(
        f"{op}: expert_axis must be an axis of a mesh; got none. Call within jax.set_mesh(mesh) or "
        "a shard_map over the axis, or pass mesh=."
    )


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


def expert_spec(
    op: str,
    options: LayerOptions,
    x: Any,
    w_gate_up: Any,
    w_down: Any,
    axis: AxisName,
    *,
    size: int,
    tokens: int,
    top_k: int,
    experts: int,
    exchange: Name | None,
    capacity: int | None,
) -> ExpertSpec:
    """What is static about the layer: sizes are those of a device, x and weights of any extent."""
    max_slots = None if capacity is None else experts * capacity
    how = make_exchange(exchange, axis, size, tokens, top_k, max_slots)
    recipe, implementation = options.recipe, options.implementation
    check_num_experts(op, experts, w_gate_up)
    products = make_specs(op, x, w_gate_up, w_down, recipe, implementation)
    return ExpertSpec(products, how, experts, *_rows(how, experts, capacity))


def _rows(exchange: Exchange, experts: int, capacity: int | None) -> tuple[int, bool]:
    """Rows of a turn, and whether they always are all."""
    # Not min(top_k, experts): a router may choose an expert twice for a token.
    most = exchange.received * exchange.top_k
    if capacity is not None:
        most = min(most, exchange.size * experts * capacity)
        return most, True
    expected = exchange.tokens * exchange.top_k
    rows = max(math.ceil(_HEADROOM * expected / _ROW_UNIT) * _ROW_UNIT, _MIN_ROWS)
    return (rows, False) if rows < most else (most, True)
