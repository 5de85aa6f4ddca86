"""expert_mlp: the experts of an expert-parallel layer, on tokens that travel as FP8.

On each device of the expert axis, inside shard_map, with the FP8 format in brackets:

    x        [1x128, power-of-two scales]  sent to the devices of the token's experts
    rows     the tokens of each local expert, copied from those received, in FP8
    partial  the weighted results of a token's local experts, in the dtype of x; sent back and added

    dout     [1x128, power-of-two scales]  sent as x was
    dx       summed over the local experts in the dtype of x; sent back and added

With the recipe's fp8_combine, partial and dx are sent back quantised, 1x128, as x and dout were.

The products are those of moe/_mlp_products.py. Scales of what travels are powers of two, whatever
the recipe (DeepSeek-V3 report, section 3.3.3): the weight gradients read x and dout in other
blocks, and requantising then moves next to no value.

An expert takes as many tokens as it gets. Rows are computed `rows` at a time, a number that evenly
spread choices do not reach: it bounds the memory, and a turn more is taken only where it is passed.
What turns contribute to a token or a weight is added in the dtype of the sum. gate_up of the first
turn is kept for the backward pass; that of the others is computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec, name_residual, quantize_args
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm.moe._choices import sort_choices
from jax_fp8gemm.moe._mlp_products import Experts, weights_both_ways
from jax_fp8gemm.moe._parallel.expert_spec import ExpertSpec
from jax_fp8gemm.moe._parallel.rows import Received, add_turns
from jax_fp8gemm.moe._parallel.turn import backward_turn, forward_turn


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_mlp(spec: ExpertSpec, x, weights, w_gate_up: Any, w_down: Any, indices) -> jax.Array:
    """The weighted sum over the choices of each token of its experts' results, (t, d).

    Args:
      x: (t, d), the tokens of this device.
      weights, indices: (t, top_k), of their choices; experts are numbered along the axis, any
        other number is no expert.
      w_gate_up, w_down: (experts, d, 2 f) and (experts, f, d), the experts of this device.
    """
    return _expert_mlp_fwd(spec, x, weights, w_gate_up, w_down, indices)[0]


def _expert_mlp_fwd(spec: ExpertSpec, x, weights, w_gate_up: Any, w_down: Any, indices):
    kept, transposed = weights_both_ways(spec.products, w_gate_up, w_down)
    out, residuals = forward(spec, x, weights, transposed, indices)
    return out, (residuals, kept)


def _expert_mlp_bwd(spec: ExpertSpec, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
    kept, w = residuals
    return (*backward(spec, kept, w, dout), None)


expert_mlp.defvjp(_expert_mlp_fwd, _expert_mlp_bwd)


def forward(
    spec: ExpertSpec, x: jax.Array, weights: jax.Array, w: Experts, indices: jax.Array
) -> tuple[jax.Array, Any]:
    """The result of expert_mlp, with transposed weights, and what the backward pass needs."""
    exchange = spec.exchange
    tokens = quantize(x, **_travel_args(spec.products.into, spec.products.into.recipe.fwd))
    plan = exchange.plan(indices // spec.experts)
    sent = tokens, weights, indices

    def run(turn: Any) -> tuple[jax.Array, Received, jax.Array]:
        received = _receive(spec, plan, turn, *sent)
        partial_sums, gate_up = forward_turn(spec, received, 0, w)
        step = lambda turn: forward_turn(spec, received, turn, w)[0]
        partial_sums = add_turns(partial_sums, _num_turns(spec, received), step)
        partial_sums = _to_give_back(spec, spec.products.into.recipe.fwd, partial_sums)
        return exchange.give_back(plan, turn, partial_sums), received, gate_up

    out, received, gate_up = run(0)
    out = add_turns(out, exchange.num_turns(plan), lambda turn: run(turn)[0]).astype(x.dtype)
    kept = name_residual("lhs", received), name_residual("out", gate_up)
    # What is sent again in the turns after the first.
    again = None if exchange.has_one_turn else name_residual("lhs", sent)
    return name_residual("out", out), (*kept, plan, again)


def backward(
    spec: ExpertSpec, residuals: Any, w: Experts, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """The gradients of x, weights, w_gate_up and w_down."""
    received, gate_up, plan, sent = residuals
    exchange = spec.exchange
    quantised = quantize(dout, **_travel_args(spec.products.down, spec.products.down.recipe.bwd))

    def run(turn: Any, received: Received, gate_up: jax.Array | None) -> tuple[Any, ...]:
        send = lambda x: exchange.send(plan, turn, x)
        douts = ScaledArray(send(quantised.values), send(quantised.scale))
        first = backward_turn(spec, received, douts, 0, w, gate_up)
        step = lambda turn: backward_turn(spec, received, douts, turn, w, None)
        dx, dweights, *drhs = add_turns(first, _num_turns(spec, received), step)
        give_back = lambda x: exchange.give_back(plan, turn, x)
        dx = _to_give_back(spec, spec.products.into.recipe.bwd, dx)
        return give_back(dx), give_back(dweights), *drhs

    first = run(0, received, gate_up)
    step = lambda turn: run(turn, _receive(spec, plan, turn, *sent), None)
    dx, dweights, *drhs = add_turns(first, exchange.num_turns(plan), step)
    return dx.astype(spec.products.into.lhs_dtype), dweights.astype(received.weights.dtype), *drhs


def _travel_args(spec: ProductSpec, fmt: Any) -> dict[str, Any]:
    return quantize_args(spec, fmt) | dict(pow2_scale=True)


def _to_give_back(spec: ExpertSpec, fmt: Any, x: jax.Array) -> jax.Array | ScaledArray:
    """`x`, results or their gradients, as it travels back."""
    return (
        quantize(x, **_travel_args(spec.products.into, fmt))
        if spec.products.into.recipe.fp8_combine
        else x
    )


def _receive(spec: ExpertSpec, plan: Any, turn: Any, tokens, weights, indices) -> Received:
    send = partial(spec.exchange.send, plan, turn)
    local = send(indices, empty=-1) - lax.axis_index(spec.exchange.axis) * spec.experts
    tokens = ScaledArray(send(tokens.values), send(tokens.scale))
    return Received(tokens, send(weights), *sort_choices(local, spec.experts))


def _num_turns(spec: ExpertSpec, received: Received) -> jax.Array | int:
    """Turns until all rows are computed."""
    return 1 if spec.has_one_turn else -(-received.sizes.sum() // spec.rows)
