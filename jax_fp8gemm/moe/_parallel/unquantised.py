"""Expert-parallel layers whose tokens travel as they are: recipes whose gradients read them so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from jax_fp8gemm.moe._parallel.exchange import Exchange


def unquantised_exchange(
    exchange: Exchange,
    layer: Callable[..., jax.Array],
    x: jax.Array,
    weights: jax.Array,
    w_gate_up: Any,
    w_down: Any,
    indices: jax.Array,
) -> jax.Array:
    """layer(x, indices, weights, w_gate_up, w_down) on the tokens of each local expert.

    Operands as for expert_mlp; the layer's experts are numbered from 0, any other is no expert.
    """
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
