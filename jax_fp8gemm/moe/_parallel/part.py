"""What an expert-parallel layer does with one part of the tokens of a device."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_fp8gemm._data.recipe import Format
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._ops.product_spec import quantize_args
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm.moe._choices import sort_choices
from jax_fp8gemm.moe._mlp_products import Experts, Residuals
from jax_fp8gemm.moe._parallel.exchange_kinds import Plan, TurnNumber
from jax_fp8gemm.moe._parallel.expert_spec import ExpertSpec, PartSpec
from jax_fp8gemm.moe._parallel.parts import after
from jax_fp8gemm.moe._parallel.rows import (
    Received,
    add_turns,
    in_one_turn_or_more,
    rows_of_turn,
    with_later_turns,
)
from jax_fp8gemm.moe._parallel.strips import WHOLE, GiveBack, Strips
from jax_fp8gemm.moe._parallel.turn import Results, forward_turn


class Sent(NamedTuple):
    """Tokens that travel, and the experts and weights of their choices; before or after."""

    tokens: ScaledArray
    indices: jax.Array
    weights: jax.Array


class KeptPart(NamedTuple):
    """What `forward` keeps of one part.

    Attributes:
      received: what this device received in the first turn of the exchange.
      of_rows: what is kept of the first turn of rows.
      plan: the plan of the exchange.
      sent: what is sent once more in the later turns of the exchange; None if there are none.
    """

    received: Received
    of_rows: Residuals
    plan: Plan
    sent: Sent | None


class Kept(NamedTuple):
    """What `forward` keeps for `backward`."""

    parts: tuple[KeptPart, ...]


def quantize_to_send(spec: ExpertSpec, fmt: Format | None, x: jax.Array) -> ScaledArray:
    """Quantises x, or its like, in the scales in which it travels."""
    args: dict[str, Any] = quantize_args(spec.products.into, fmt) | dict(pow2_scale=True)
    return quantize(x, **args)


def send(part: PartSpec, plan: Plan, turn: TurnNumber, x: ScaledArray) -> ScaledArray:
    """Sends x, and returns what this device receives."""
    values, scale = (part.exchange.send(plan, turn, y) for y in values_and_scale(x))
    return ScaledArray(values, scale)


def send_tokens(part: PartSpec, plan: Plan, turn: TurnNumber, sent: Sent) -> Sent:
    """Sends what this device has, and returns what it receives.

    Values arrive last: the rest is little, and rows are sorted by it while values travel.
    """
    exchange = partial(part.exchange.send, plan, turn)
    values, scale = values_and_scale(sent.tokens)
    first = exchange(scale), exchange(sent.indices, empty=-1), exchange(sent.weights)
    scale, indices, weights = first
    return Sent(ScaledArray(exchange(after(values, first)), scale), indices, weights)


def receive(spec: ExpertSpec, part: PartSpec, arrived: Sent) -> Received:
    """Returns the rows that the experts of this device make of what has arrived."""
    local = arrived.indices - lax.axis_index(part.exchange.axis) * spec.num_local_experts
    choices = sort_choices(local, spec.num_local_experts)
    return Received(arrived.tokens, arrived.weights, *choices)


def give_back(
    spec: ExpertSpec,
    part: PartSpec,
    plan: Plan,
    turn: TurnNumber,
    fmt: Format | None,
    y: jax.Array,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Sends y (r, d) back, as FP8 if the recipe says so; returns the sums (t, d) of tokens."""
    is_quantised = spec.products.into.recipe.fp8_combine
    encode = partial(quantize_to_send, spec, fmt) if is_quantised else None
    return part.exchange.give_back(plan, turn, y, encode).astype(dtype)


def results(
    spec: ExpertSpec,
    part: PartSpec,
    received: Received,
    w: Experts,
    give_back: GiveBack,
    *,
    with_columns: bool = False,
    keeps_gate_up: bool = False,
    in_strips: bool = False,
) -> tuple[jax.Array, Results]:
    """Returns what give_back makes of the sums of all rows, and the results of the first turn.

    These have the sums of all rows too; or what is given back, with in_strips.

    with_columns, keeps_gate_up: what the first turn has, as for forward_turn.
    in_strips: whether strips of columns are given back while others are computed, if the part has
      several. What travels then begins and ends in a branch, beside which XLA has nothing travel.
    """
    count = num_turns(part, received)
    # Outside of the branches, where the backward pass finds them.
    first_rows = rows_of_turn(received, 0, part.rows)
    # Likewise: XLA has a kernel for each, and launches behind a branch keep the GPU waiting.
    columns = tuple(received.weights.T) if spec.products.into.recipe.batch_invariant else ()

    def first(strips: Strips = WHOLE) -> Results:
        how = spec.products, received, columns, first_rows, w
        kept: dict[str, Any] = dict(with_columns=with_columns, keeps_gate_up=keeps_gate_up)
        return forward_turn(*how, strips=strips, **kept)

    def later(found: Results) -> Results:
        def sums(turn: jax.Array) -> jax.Array:
            rows = rows_of_turn(received, turn, part.rows)
            return forward_turn(spec.products, received, columns, rows, w).out

        return found._replace(out=add_turns(found.out, count, sums))

    if part.num_strips == 1 or not in_strips:
        found = with_later_turns(count, first, later)
        return give_back(found.out), found
    if not isinstance(count, int):
        count = lax.pmax(count, part.exchange.axis)  # all devices must give back in the same branch

    def strips() -> Results:
        return first(Strips(part.num_strips, give_back))

    def whole() -> Results:
        found = later(first())
        return found._replace(out=give_back(found.out))

    found = in_one_turn_or_more(count, strips, whole)
    return found.out, found


def num_turns(part: PartSpec, received: Received) -> jax.Array | int:
    """Returns the number of turns until all received rows are computed."""
    return 1 if part.has_one_turn else -(-received.sizes.sum() // part.rows)
