"""The expert-parallel layer of recipes whose tokens travel unquantised.

Their weight gradients read x and dout in the dtype of x. JAX differentiates this layer through its
parts, and each direction of the exchange has the other one as its derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from jax_fp8gemm.moe._local_layer import local_layer
from jax_fp8gemm.moe._operands import Operands
from jax_fp8gemm.moe._options import LayerOptions
from jax_fp8gemm.moe._parallel.exchange_kinds import Exchange, Plan
from jax_fp8gemm.moe._parallel.parts import divide, join


def unquantised_layer(
    options: LayerOptions, exchanges: Sequence[Exchange], operands: Operands
) -> jax.Array:
    """Sends tokens to the devices of their experts, runs local_layer there, and adds the results.

    exchanges: of each part of the tokens. Each must have one turn. JAX adds the gradients of the
      parts in the dtype of the weights.
    operands: as for expert_mlp.
    """
    x, indices, weights, *experts = operands
    num_local_experts = operands.w_gate_up.shape[0]
    num_experts = exchanges[0].size * num_local_experts
    capacity = options.capacity(indices.size, num_experts)
    run = partial(_run_part, options, num_local_experts)
    parts = divide((x, indices, weights), [exchange.tokens for exchange in exchanges])
    return join(
        [
            run(None if capacity is None else num_experts * capacity, exchange, *part, *experts)
            for exchange, part in zip(exchanges, parts, strict=True)
        ]
    )


def _run_part(
    options: LayerOptions,
    num_local_experts: int,
    max_rows: int | None,
    exchange: Exchange,
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    *experts: Any,
) -> jax.Array:
    plan = exchange.plan(indices // num_local_experts)
    send = partial(_send, exchange, plan)
    local = exchange.send(plan, 0, indices, empty=-1)
    local -= lax.axis_index(exchange.axis) * num_local_experts
    received = Operands(send(x), local, send(weights), *experts)
    return _give_back(exchange, plan, local_layer(options, received, max_rows=max_rows))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(exchange: Exchange, plan: Plan, x: jax.Array) -> jax.Array:
    return exchange.send(plan, 0, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _give_back(exchange: Exchange, plan: Plan, y: jax.Array) -> jax.Array:
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
