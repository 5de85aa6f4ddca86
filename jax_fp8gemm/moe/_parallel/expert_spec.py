"""ExpertSpec: what is static about expert_mlp."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax_fp8gemm.moe._mlp_specs import Specs, check_num_experts, make_specs
from jax_fp8gemm.moe._options import LayerOptions
from jax_fp8gemm.moe._parallel.exchange import AxisName, Exchange, Name, make_exchange

_HEADROOM = 1.25  # rows of a turn over those that evenly spread choices make
_ROW_UNIT = 128
_MIN_ROWS = 4096  # of a turn, where there are as many


@dataclass(frozen=True)
class ExpertSpec:
    """What is static about the layer.

    Attributes:
      products: those with w_gate_up and with w_down.
      exchange: of tokens.
      experts: on each device.
      rows: computed in a turn.
      has_one_turn: whether `rows` holds all rows, whatever the choices.
    """

    products: Specs
    exchange: Exchange
    experts: int
    rows: int
    has_one_turn: bool


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
