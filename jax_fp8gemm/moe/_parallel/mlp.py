"""expert_mlp: the experts of an expert-parallel layer, on tokens that travel as FP8.

It runs on each device of the expert axis, inside a shard_map. Brackets hold scale blocks.

    x        [1x128, power-of-two scales]  is sent to the devices of the token's experts
    rows     [as x]  are copies of the received tokens, one for each choice of a local expert
    partial  is the weighted sum of a token's rows after the experts, in the dtype of x; it is sent
             back, and added to those of the other devices

    dout     [1x128, power-of-two scales]  is sent as x was
    dx       is summed over the local experts, in the dtype of x; it is sent back and added

If the recipe has fp8_combine, partial and dx are quantised before they are sent back, as x and dout
are. The scales of what travels are powers of two in every recipe (DeepSeek-V3 report, section
3.3.3): weight gradients read x and dout in other blocks, and quantising them again then changes
hardly any value. The products are those of moe/_mlp_products.py.

No token is dropped, so the number of rows is not known before. Two loops take turns:
  - An exchange with fewer slots than tokens sends the rest in further turns.
  - The received rows are computed `rows` at a time. Evenly spread choices fill one such turn at
    most, and this bounds the memory.
What turns contribute to a token or to a weight is added in the dtype of the sum. gate_up of the
first turn is kept for the backward pass. That of further turns is computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from jax_fp8gemm._data.recipe import Format
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._ops.product_spec import name_residual, quantize_args
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm.moe._biases import as_biases
from jax_fp8gemm.moe._choices import sort_choices
from jax_fp8gemm.moe._mlp_products import Experts, weights_both_ways
from jax_fp8gemm.moe._operands import Operands
from jax_fp8gemm.moe._parallel.exchange_kinds import Plan, TurnNumber
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
    x, indices, weights, w_gate_up, w_down, biases = operands
    w, transposed = weights_both_ways(spec.products, w_gate_up, w_down, biases)
    out, kept = forward(spec, x, indices, weights, transposed)
    return out, (kept, w)


def _expert_mlp_bwd(
    spec: ExpertSpec, residuals: tuple[Kept, Experts], dout: jax.Array
) -> tuple[Operands]:
    kept, w = residuals
    gradients = backward(spec, kept, w, dout)
    biases = as_biases(gradients.biases, w.biases)
    weights = spec.products.gradients_of_weights(gradients.w_gate_up, gradients.w_down)
    return (Operands._make((gradients.x, None, gradients.weights, *weights, biases)),)


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

    def run(turn: TurnNumber) -> tuple[jax.Array, Received, jax.Array]:
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
    """Returns the gradients of x, weights, w_gate_up, w_down and, in f32, of the biases."""
    exchange, plan = spec.exchange, kept.plan
    fmt = spec.products.into.recipe.bwd
    quantised = _quantize_to_send(spec, fmt, dout)

    def run(turn: TurnNumber, received: Received, gate_up: jax.Array | None) -> Gradients:
        send = partial(exchange.send, plan, turn)
        values, scale = map(send, values_and_scale(quantised))
        douts = ScaledArray(values, scale)
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
    """Quantises x, or its like, in the scales in which it travels."""
    args: dict[str, Any] = quantize_args(spec.products.into, fmt) | dict(pow2_scale=True)
    return quantize(x, **args)


def _give_back(
    spec: ExpertSpec, plan: Plan, turn: TurnNumber, fmt: Format | None, y: jax.Array
) -> jax.Array:
    """Sends y (r, d) back, as FP8 if the recipe says so; returns the sums (t, d) of tokens."""
    is_quantised = spec.products.into.recipe.fp8_combine
    back = _quantize_to_send(spec, fmt, y) if is_quantised else y
    return spec.exchange.give_back(plan, turn, back)


def _receive(spec: ExpertSpec, plan: Plan, turn: TurnNumber, sent: Sent) -> Received:
    """Sends what this device has, and returns what it receives."""
    send = partial(spec.exchange.send, plan, turn)
    experts = send(sent.indices, empty=-1)
    local = experts - lax.axis_index(spec.exchange.axis) * spec.num_local_experts
    values, scale = map(send, values_and_scale(sent.tokens))
    tokens = ScaledArray(values, scale)
    return Received(tokens, send(sent.weights), *sort_choices(local, spec.num_local_experts))


def _num_turns(spec: ExpertSpec, received: Received) -> jax.Array | int:
    """Returns the number of turns until all received rows are computed."""
    return 1 if spec.has_one_turn else -(-received.sizes.sum() // spec.rows)
