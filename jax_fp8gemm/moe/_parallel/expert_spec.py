"""ExpertSpec: what is static about an expert-parallel layer, and its exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from jax_fp8gemm.moe._mlp_specs import Specs, check_num_experts, make_specs
from jax_fp8gemm.moe._operands import Weights
from jax_fp8gemm.moe._options import OP, LayerOptions
from jax_fp8gemm.moe._parallel.exchange import Name, make_exchange
from jax_fp8gemm.moe._parallel.exchange_kinds import Exchange

_HEADROOM = 1.25  # the rows of a turn, over the rows that evenly spread choices make
_ROW_UNIT = 128
_MIN_ROWS = 4096  # a turn has at least as many rows, unless there are never as many


@dataclass(frozen=True)
class ExpertSpec:
    """What is static about expert_mlp.

    Attributes:
      products: the specs of the products with w_gate_up and with w_down.
      exchange: how tokens travel.
      num_local_experts: the number of experts on each device.
      rows: the number of rows that a turn computes.
      has_one_turn: whether `rows` is enough for all rows, whatever the choices.
    """

    products: Specs
    exchange: Exchange
    num_local_experts: int
    rows: int
    has_one_turn: bool


def layer_exchange(
    options: LayerOptions,
    name: Name | None,
    axes: tuple[str, ...],
    size: int,
    tokens: int,
    num_experts: int,
) -> Exchange:
    """Returns the exchange of a layer along `axes`, with `tokens` on each of the `size` devices."""
    capacity = options.capacity(tokens * options.top_k, num_experts)
    if capacity is not None:
        max_slots = num_experts // size * capacity
    else:
        # JAX differentiates the exchange of an unquantised layer, which therefore has one turn.
        max_slots = None if options.recipe.is_fused else tokens
    axis = axes[0] if len(axes) == 1 else axes
    return make_exchange(name, axis, size, tokens, options.top_k, max_slots)


def expert_spec(
    options: LayerOptions,
    exchange: Exchange,
    num_experts: int,
    x: jax.Array,
    w_gate_up: Weights,
    w_down: Weights,
) -> ExpertSpec:
    """Returns the spec of a layer of num_experts experts on all devices.

    The extents of x and of the weights do not matter here.
    """
    num_local_experts = num_experts // exchange.size
    check_num_experts(OP, num_local_experts, w_gate_up)
    how = options.recipe, options.implementation, options.activation
    products = make_specs(OP, x, w_gate_up, w_down, *how)
    capacity = options.capacity(exchange.tokens * exchange.top_k, num_experts)
    rows, has_one_turn = _rows(exchange, num_local_experts, capacity)
    return ExpertSpec(products, exchange, num_local_experts, rows, has_one_turn)


def _rows(exchange: Exchange, num_local_experts: int, capacity: int | None) -> tuple[int, bool]:
    """Returns the rows of a turn, and whether they are always enough."""
    # Not min(top_k, num_local_experts): a router may choose an expert twice for a token.
    most = exchange.received * exchange.top_k
    if capacity is not None:
        return min(most, exchange.size * num_local_experts * capacity), True
    expected = exchange.tokens * exchange.top_k
    rows = max(math.ceil(_HEADROOM * expected / _ROW_UNIT) * _ROW_UNIT, _MIN_ROWS)
    return (rows, False) if rows < most else (most, True)
