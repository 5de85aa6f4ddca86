"""moe_layer with an expert_axis: the experts of a mixture spread along a mesh axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._exchange import NAMES, Exchange, Name, make_exchange
from jax_fp8gemm._expert_mlp import ExpertSpec, expert_mlp
from jax_fp8gemm._matmul_spec import check_precision, kernel_dtype, make_spec
from jax_fp8gemm._primitive import match_varying
from jax_fp8gemm._quantize import Implementation
from jax_fp8gemm._recipe import Recipe
from jax_fp8gemm._scaled_array import ScaledArray
from jax_fp8gemm._weights import without_gradient

_HEADROOM = 1.25  # rows of a turn over those that evenly spread choices make
_ROW_UNIT = 128
_MIN_ROWS = 4096  # of a turn, where there are as many

# (x, indices, weights, w_gate_up, w_down) -> out, on one device
Layer = Callable[..., jax.Array]


def axis_names(op: str, expert_axis: Any, exchange: Any) -> tuple[str, ...]:
    """The mesh axes that `expert_axis` names."""
    names = (expert_axis,) if isinstance(expert_axis, str) else expert_axis
    if not isinstance(names, tuple) or not names or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"{op}: expert_axis must be the name of a mesh axis, or a tuple of names; "
            f"got {expert_axis!r}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{op}: expert_axis must name each mesh axis once; got {expert_axis!r}")
    if exchange not in (None, *NAMES):
        raise ValueError(f"{op}: exchange must be None or of {', '.join(NAMES)}; got {exchange!r}")
    return names


def is_manual(names: tuple[str, ...]) -> bool:
    """Whether the caller is inside a shard_map over these axes."""
    return set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def on_mesh(
    op: str, layer: Layer, operands: tuple[Any, ...], names: tuple[str, ...], mesh: Any
) -> jax.Array:
    """layer(x, router, w_gate_up, w_down) in a shard_map.

    Tokens are cut along all axes of the mesh that the caller is not in a shard_map over already;
    experts along those of `names`.
    """
    x, router, *weights = operands
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
    size = math.prod(mesh.shape[name] for name in token_axes)
    if x.shape[0] % size:
        raise ValueError(
            f"{op}: the tokens must divide evenly among the {size} devices of the mesh axes "
            f"{', '.join(token_axes)}; got {x.shape[0]} tokens. Pad x, or call in a shard_map."
        )
    _experts_per_device(op, weights[0].shape[0], math.prod(mesh.shape[name] for name in names))
    tokens, experts = PartitionSpec(token_axes), PartitionSpec(names)
    specs = (tokens, jax.tree.map(lambda _: tokens, router), experts, experts)
    specs = jax.tree.map(lambda spec, x: jax.tree.map(lambda _: spec, x), specs, operands)
    operands = jax.tree.map(partial(_reshard, mesh), operands, specs)
    run = jax.shard_map(
        layer, mesh=mesh, in_specs=specs, out_specs=tokens, axis_names=set(token_axes)
    )
    return run(*operands)


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


def _reshard(mesh: Any, x: Any, spec: PartitionSpec) -> jax.Array:
    """`x` as `spec` says over the Explicit axes; XLA moves it along the others."""
    x = jnp.asarray(x)
    explicit = set(jax.typeof(x).sharding.mesh.explicit_axes)
    if not explicit:
        return x
    dims = [tuple(name for name in axes if name in explicit) or None for axes in spec]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*dims)))


def _experts_per_device(op: str, num_experts: int, size: int) -> int:
    if num_experts % size:
        raise ValueError(
            f"{op}: the experts must divide evenly among the {size} devices of expert_axis; "
            f"got {num_experts}"
        )
    return num_experts // size


def expert_parallel(
    op: str,
    layer: Layer,
    operands: tuple[Any, ...],
    *,
    names: tuple[str, ...],
    exchange: Name | None,
    capacity: int | None,
    recipe: Recipe,
    implementation: Implementation,
) -> jax.Array:
    """The layer on one device's tokens and experts, in a shard_map over the axes `names`.

    Args:
      layer: of the experts of one device on whatever tokens, where the tokens do not travel as FP8.
      operands: x (t, d); indices, weights (t, top_k); w_gate_up, w_down.
      capacity: tokens that an expert takes from a device, None: all.
    """
    x, indices, weights, w_gate_up, w_down = operands
    if x.size == 0:
        return jnp.zeros_like(x)
    axis = names[0] if len(names) == 1 else names
    size, (t, top_k), experts = lax.axis_size(axis), indices.shape, w_gate_up.shape[0]
    travels_as_fp8 = recipe.is_fp8 and recipe.wgrad == "fp8"
    # Derivatives of other recipes pass through the exchange, and it through one turn only.
    max_slots = None if travels_as_fp8 else t
    max_slots = max_slots if capacity is None else experts * capacity
    how = make_exchange(exchange, axis, size, t, top_k, max_slots)
    w_gate_up = without_gradient(op, "w_gate_up", w_gate_up)
    w_down = without_gradient(op, "w_down", w_down)
    operands = match_varying(x, weights, w_gate_up, w_down, indices)
    # The tokens of a device differ, whether or not the operands do.
    operands = jax.tree.map(partial(_vary_over, names), operands)
    if not travels_as_fp8:
        return _unquantised(how, layer, *operands)
    weight = lambda w: None if isinstance(w, ScaledArray) else w
    kept = kernel_dtype(x.dtype)
    into = make_spec(op, x, weight(w_gate_up), recipe, kept, implementation)
    h = jax.ShapeDtypeStruct((1, w_down.shape[1]), kept)
    down = make_spec(op, h, weight(w_down), recipe, x.dtype, implementation)
    check_precision(op, None, into)
    rows, has_one_turn = _rows(how, experts, capacity)
    return expert_mlp(ExpertSpec(into, down, how, experts, rows, has_one_turn), *operands)


def _vary_over(names: tuple[str, ...], x: jax.Array) -> jax.Array:
    missing = set(names) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _rows(exchange: Exchange, experts: int, capacity: int | None) -> tuple[int, bool]:
    """Rows of a turn, and whether they always are all."""
    most = exchange.received * min(exchange.top_k, experts)
    if capacity is not None:
        most = min(most, exchange.size * experts * capacity)
        return most, True
    expected = exchange.tokens * exchange.top_k
    rows = max(math.ceil(_HEADROOM * expected / _ROW_UNIT) * _ROW_UNIT, _MIN_ROWS)
    return (rows, False) if rows < most else (most, True)


def _unquantised(exchange: Exchange, layer: Layer, x, weights, w_gate_up, w_down, indices):
    """The layer on tokens that travel as they are: for recipes whose gradients read them so."""
    experts = w_gate_up.shape[0]
    plan = exchange.plan(indices // experts)
    send = partial(_send, exchange, plan)
    local = exchange.send(plan, 0, indices, empty=-1) - lax.axis_index(exchange.axis) * experts
    out = layer(send(x), local, send(weights), w_gate_up, w_down)
    return _give_back(exchange, plan, out)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(exchange: Exchange, plan: Any, x: jax.Array) -> jax.Array:
    return exchange.send(plan, 0, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _give_back(exchange: Exchange, plan: Any, y: jax.Array) -> jax.Array:
    return exchange.give_back(plan, 0, y).astype(y.dtype)


# Each is the other's transpose.
_send.defvjp(
    lambda exchange, plan, x: (_send(exchange, plan, x), plan),
    lambda exchange, plan, dy: (None, _give_back(exchange, plan, dy)),
)
_give_back.defvjp(
    lambda exchange, plan, y: (_give_back(exchange, plan, y), plan),
    lambda exchange, plan, dout: (None, _send(exchange, plan, dout)),
)
