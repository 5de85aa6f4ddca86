"""The backward pass of expert_mlp, part by part.

In each part the gradients of tokens come first, and travel back while those of weights are
computed. Both have a loop over further turns of rows. These are rare, so both loops may compute the
gradient of gate_up again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm.moe._biases import Biases
from jax_fp8gemm.moe._mlp_products import Experts, Residuals
from jax_fp8gemm.moe._parallel.exchange_kinds import Plan, TurnNumber
from jax_fp8gemm.moe._parallel.expert_spec import ExpertSpec, PartSpec
from jax_fp8gemm.moe._parallel.part import (
    Kept,
    give_back,
    num_turns,
    quantize_to_send,
    receive,
    send,
    send_tokens,
)
from jax_fp8gemm.moe._parallel.parts import after, at_the_end, divide, in_order, join
from jax_fp8gemm.moe._parallel.rows import (
    Received,
    Turn,
    add_turns,
    rows_of_turn,
    with_later_turns,
)
from jax_fp8gemm.moe._parallel.turn import RowGradients, TokenGradients, backward_turn
from jax_fp8gemm.moe._parallel.weight_gradients import WeightGradients, weight_gradients


class Gradients(NamedTuple):
    """The gradients of the operands; that of weights which are quantised already is None.

    x is (r, d) and weights (r, top_k), for r tokens. Those of biases are f32.
    """

    x: jax.Array
    weights: jax.Array
    w_gate_up: jax.Array | None
    w_down: jax.Array | None
    biases: Biases | None


def backward(spec: ExpertSpec, kept: Kept, w: Experts, dout: jax.Array) -> Gradients:
    """Returns the gradients of x, weights, w_gate_up, w_down and, in f32, of the biases."""
    summed = spec if len(spec.parts) == 1 else _with_f32_gradients(spec)
    sent = quantize_to_send(spec, spec.products.into.recipe.bwd, dout)
    sent = divide(sent, spec.part_sizes)

    def arrive(i: int, *earlier: Any) -> ScaledArray:
        return send(spec.parts[i], kept.parts[i].plan, 0, after(sent[i], earlier))

    of_tokens, dw, first = [], None, ()
    for i, part, arrived in in_order(spec.parts, arrive):
        received, residuals, plan, _ = kept.parts[i]
        arrivals = _Arrivals(summed, part, received, after(arrived, first), w)
        first, of_rows = arrivals.of_tokens(residuals)
        of_tokens.append(arrivals.give_back(plan, 0, first))
        dw = arrivals.of_weights(of_rows, dw)
    assert dw is not None
    for i, first in enumerate(at_the_end(spec.parts, of_tokens)):
        of_tokens[i], dw = _later_turns(summed, i, kept, sent[i], w, first, dw)
    tokens = join(of_tokens)
    dtype = kept.parts[0].received.weights.dtype
    drhs = dw.w_gate_up, dw.w_down
    both = spec.products.into, spec.products.down
    dw_gate_up, dw_down = (
        None if x is None else x.astype(product.rhs_dtype)
        for x, product in zip(drhs, both, strict=True)
    )
    dx = tokens.x.astype(spec.products.into.lhs_dtype)
    return Gradients(dx, tokens.weights.astype(dtype), dw_gate_up, dw_down, dw.biases)


def _with_f32_gradients(spec: ExpertSpec) -> ExpertSpec:
    """Returns `spec` whose gradients of weights are f32, as their sums over parts are."""
    into, down = (
        product if product.rhs_dtype is None else replace(product, rhs_dtype=jnp.dtype(jnp.float32))
        for product in (spec.products.into, spec.products.down)
    )
    return replace(spec, products=spec.products._replace(into=into, down=down))


@dataclass(frozen=True)
class _Arrivals:
    """What a device has received of a part in a turn of the exchange: tokens and their dout."""

    spec: ExpertSpec
    part: PartSpec
    received: Received
    douts: ScaledArray
    w: Experts

    def turn(
        self, rows: Turn, turn: TurnNumber, residuals: Residuals | None = None
    ) -> tuple[TokenGradients, RowGradients]:
        """Returns backward_turn of these rows."""
        how = self.spec.products, self.received, self.douts, rows, turn, self.w, residuals
        return backward_turn(*how)

    def later_turn(self, turn: jax.Array) -> tuple[TokenGradients, RowGradients]:
        return self.turn(rows_of_turn(self.received, turn, self.part.rows), turn)

    def of_tokens(self, residuals: Residuals | None = None) -> tuple[TokenGradients, RowGradients]:
        """Returns the gradients of tokens from all rows, and RowGradients of the first ones.

        residuals: what the forward pass kept of the first rows.
        """
        count = num_turns(self.part, self.received)
        rows = rows_of_turn(self.received, 0, self.part.rows)

        def later(found: tuple[TokenGradients, RowGradients]):
            of_tokens, of_rows = found
            return add_turns(of_tokens, count, lambda turn: self.later_turn(turn)[0]), of_rows

        return with_later_turns(count, lambda: self.turn(rows, 0, residuals), later)

    def give_back(self, plan: Plan, turn: TurnNumber, of_tokens: TokenGradients) -> TokenGradients:
        """Sends the gradients of tokens back."""
        fmt = self.spec.products.into.recipe.bwd
        dx = give_back(self.spec, self.part, plan, turn, fmt, of_tokens.x)
        return TokenGradients(dx, self.part.exchange.give_back(plan, turn, of_tokens.weights))

    def of_weights(self, first: RowGradients, accum: WeightGradients | None) -> WeightGradients:
        """Returns the gradients of weights from all rows, plus `accum`. first: the first rows."""

        def run(of_rows: RowGradients, accum: WeightGradients | None = None) -> WeightGradients:
            has_biases = self.w.biases is not None
            how = self.spec.products, self.received, self.douts, of_rows, has_biases, accum
            return weight_gradients(*how)

        def later(dw: WeightGradients) -> WeightGradients:
            return add_turns(dw, count, lambda turn: run(self.later_turn(turn)[1]))

        count = num_turns(self.part, self.received)
        return with_later_turns(count, lambda: run(first, accum), later)


def _later_turns(
    spec: ExpertSpec,
    i: int,
    kept: Kept,
    sent: ScaledArray,
    w: Experts,
    of_tokens: TokenGradients,
    dw: WeightGradients,
) -> tuple[TokenGradients, WeightGradients]:
    """Returns the gradients plus those of further turns of the exchange of part i."""
    part, (_, _, plan, tokens) = spec.parts[i], kept.parts[i]

    def run(turn: jax.Array) -> tuple[TokenGradients, WeightGradients]:
        assert tokens is not None
        received = receive(spec, part, send_tokens(part, plan, turn, tokens))
        arrivals = _Arrivals(spec, part, received, send(part, plan, turn, sent), w)
        first, of_rows = arrivals.of_tokens()
        return arrivals.give_back(plan, turn, first), arrivals.of_weights(of_rows, None)

    return add_turns((of_tokens, dw), part.exchange.num_turns(plan), run)
