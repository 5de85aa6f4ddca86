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
from typing import Any, NamedTuple

import jax
from jax import lax

from jax_fp8gemm._data.recipe import Format
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import name_residual, quantize_args
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm.moe._choices import sort_choices
from jax_fp8gemm.moe._mlp_products import Experts, weights_both_ways
from jax_fp8gemm.moe._operands import Operands
from jax_fp8gemm.moe._parallel.exchange import Plan
from jax_fp8gemm.moe._parallel.expert_spec import ExpertSpec
from jax_fp8gemm.moe._parallel.rows import Received, add_turns
from jax_fp8gemm.moe._parallel.turn import Gradients, backward_turn, forward_turn


class Sent(NamedTuple):
    """What a device sends: its tokens, and the experts and weights of their choices."""

    tokens: ScaledArray
    indices: jax.Array
    weights: jax.Array


class Kept(NamedTuple):
    """What `forward` keeps for `backward`.

    Attributes:
      received: what this device received in the first turn of the exchange.
      gate_up: the product of the first turn of rows.
      plan: the plan of the exchange.
      sent: what is sent once more in the later turns of the exchange; None if there are none.
    """

    received: Received
    gate_up: jax.Array
    plan: Plan
    sent: Sent | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_mlp(spec: ExpertSpec, operands: Operands) -> jax.Array:
    """Returns the weighted sum (t, d) of the results of each token's experts.

    operands: the tokens and the experts of this device. Experts are numbered along the axis.
    """
    return _expert_mlp_fwd(spec, operands)[0]


def _expert_mlp_fwd(spec: ExpertSpec, operands: Operands) -> tuple[jax.Array, tuple[Kept, Experts]]:
    x, indices, weights, w_gate_up, w_down = operands
    w, transposed = weights_both_ways(spec.products, w_gate_up, w_down)
    out, kept = forward(spec, x, indices, weights, transposed)
    return out, (kept, w)


def _expert_mlp_bwd(
    spec: ExpertSpec, residuals: tuple[Kept, Experts], dout: jax.Array
) -> tuple[Operands]:
    dx, *gradients = backward(spec, *residuals, dout)
    return (Operands._make((dx, None, *gradients)),)


expert_mlp.defvjp(_expert_mlp_fwd, _expert_mlp_bwd)


def forward(
    spec: ExpertSpec, x: jax.Array, indices: jax.Array, weights: jax.Array, w: Experts
) -> tuple[jax.Array, Kept]:
    """Returns the result of expert_mlp, by transposed weights, and what `backward` needs."""
    exchange = spec.exchange
    fmt = spec.products.into.recipe.fwd
    tokens = _quantize_to_send(spec, fmt, x)
    plan = exchange.plan(indices // spec.num_local_experts)
    sent = Sent(tokens, indices, weights)

    def run(turn: jax.Array | int) -> tuple[jax.Array, Received, jax.Array]:
        received = _receive(spec, plan, turn, sent)
        sums, gate_up = forward_turn(spec, received, 0, w)
        step = lambda turn: forward_turn(spec, received, turn, w)[0]
        sums = add_turns(sums, _num_turns(spec, received), step)
        return _give_back(spec, plan, turn, fmt, sums), received, gate_up

    out, received, gate_up = run(0)
    out = add_turns(out, exchange.num_turns(plan), lambda turn: run(turn)[0]).astype(x.dtype)
    received, gate_up = name_residual("lhs", received), name_residual("out", gate_up)
    again = None if exchange.has_one_turn else name_residual("lhs", sent)
    return name_residual("out", out), Kept(received, gate_up, plan, again)


def backward(spec: ExpertSpec, kept: Kept, w: Experts, dout: jax.Array) -> Gradients:
    """Returns the gradients of x, weights, w_gate_up and w_down."""
    exchange, plan = spec.exchange, kept.plan
    fmt = spec.products.into.recipe.bwd
    quantised = _quantize_to_send(spec, fmt, dout)

    def run(turn: jax.Array | int, received: Received, gate_up: jax.Array | None) -> Gradients:
        send = partial(exchange.send, plan, turn)
        douts = ScaledArray(send(quantised.values), send(quantised.scale))
        first = backward_turn(spec, received, douts, 0, w, gate_up)
        step = lambda turn: backward_turn(spec, received, douts, turn, w, None)
        sums = add_turns(first, _num_turns(spec, received), step)
        dx = _give_back(spec, plan, turn, fmt, sums.x)
        return sums._replace(x=dx, weights=exchange.give_back(plan, turn, sums.weights))

    def run_later(turn: jax.Array) -> Gradients:
        assert kept.sent is not None
        return run(turn, _receive(spec, plan, turn, kept.sent), None)

    first = run(0, kept.received, kept.gate_up)
    sums = add_turns(first, exchange.num_turns(plan), run_later)
    dx = sums.x.astype(spec.products.into.lhs_dtype)
    return sums._replace(x=dx, weights=sums.weights.astype(kept.received.weights.dtype))


def _quantize_to_send(spec: ExpertSpec, fmt: Format | None, x: jax.Array) -> ScaledArray:
    args: dict[str, Any] = quantize_args(spec.products.into, fmt) | dict(pow2_scale=True)
    return quantize(x, **args)


def _give_back(
    spec: ExpertSpec, plan: Plan, turn: jax.Array | int, fmt: Format | None, y: jax.Array
) -> jax.Array:
    """Sends y (r, d) back, as FP8 if the recipe says so; returns the sums (t, d) of tokens."""
    is_quantised = spec.products.into.recipe.fp8_combine
    back = _quantize_to_send(spec, fmt, y) if is_quantised else y
    return spec.exchange.give_back(plan, turn, back)


def _receive(spec: ExpertSpec, plan: Plan, turn: jax.Array | int, sent: Sent) -> Received:
    send = partial(spec.exchange.send, plan, turn)
    experts = send(sent.indices, empty=-1)
    local = experts - lax.axis_index(spec.exchange.axis) * spec.num_local_experts
    tokens = ScaledArray(send(sent.tokens.values), send(sent.tokens.scale))
    return Received(tokens, send(sent.weights), *sort_choices(local, spec.num_local_experts))


def _num_turns(spec: ExpertSpec, received: Received) -> jax.Array | int:
    """Returns the number of turns until all received rows are computed."""
    return 1 if spec.has_one_turn else -(-received.sizes.sum() // spec.rows)
