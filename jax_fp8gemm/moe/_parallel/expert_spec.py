"""ExpertSpec: what is static about an expert-parallel layer, and the exchange of each part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm.moe._mlp_specs import Specs, check_num_experts, make_specs
from jax_fp8gemm.moe._operands import Weights
from jax_fp8gemm.moe._options import OP, LayerOptions
from jax_fp8gemm.moe._parallel.choose_parts import choose_parts
from jax_fp8gemm.moe._parallel.exchange import (
    Name,
    NamePair,
    make_exchange,
    make_hierarchy,
)
from jax_fp8gemm.moe._parallel.exchange_kinds import Exchange
from jax_fp8gemm.moe._parallel.parts import sizes_of_parts
from jax_fp8gemm.moe._parallel.strips import count_strips

_HEADROOM = 1.25  # the rows of a turn, over the rows that evenly spread choices make
_ROW_UNIT = 128
_MIN_ROWS = 4096  # a turn has at least as many rows, unless there are never as many


@dataclass(frozen=True)
class PartSpec:
    """What is static about one part of the tokens of a device.

    Attributes:
      exchange: how its tokens travel.
      rows: the number of rows that a turn computes.
      has_one_turn: whether `rows` is enough for all rows, whatever the choices.
      num_strips: the number of strips of columns in which results are computed and travel back.
    """

    exchange: Exchange
    rows: int
    has_one_turn: bool
    num_strips: int


@dataclass(frozen=True)
class ExpertSpec:
    """What is static about expert_mlp.

    Attributes:
      products: the specs of the products with w_gate_up and with w_down.
      num_local_experts: the number of experts on each device.
      parts: the parts of the tokens of a device.
    """

    products: Specs
    num_local_experts: int
    parts: tuple[PartSpec, ...]

    @property
    def part_sizes(self) -> list[int]:
        """The number of tokens of each part."""
        return [part.exchange.tokens for part in self.parts]


def part_exchanges(
    options: LayerOptions,
    name: Name | NamePair | None,
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    tokens: int,
    num_experts: int,
    x: jax.Array,
    w_down: Weights,
) -> list[Exchange]:
    """Returns the exchange of each part of the `tokens` on each device of `axes`."""
    size = math.prod(sizes)
    capacity = options.capacity(tokens * options.top_k, num_experts)
    axis = axes[0] if len(axes) == 1 else axes

    def exchange(tokens: int) -> Exchange:
        if capacity is not None:
            max_slots = num_experts // size * capacity
        else:
            # JAX differentiates the exchange of an unquantised layer, which therefore has one turn.
            max_slots = None if options.recipe.is_fused else tokens
        if isinstance(name, tuple):
            host_share = options.routing.share_of_part(sizes[0])
            both = (axes[0], axes[-1]), (sizes[0], sizes[-1])  # a pair goes with two axes
            return make_hierarchy(name, *both, tokens, options.top_k, max_slots, host_share)
        return make_exchange(name, axis, size, tokens, options.top_k, max_slots)

    whole, parts = exchange(tokens), options.parts
    # The rates of choose_parts are those of one exchange: along a pair there is one part.
    if parts is None and options.recipe.is_fused and not isinstance(name, tuple):
        num_trained = 0 if isinstance(w_down, ScaledArray) else num_experts // size
        extents = num_trained, x.shape[1], w_down.shape[1]
        parts = choose_parts(whole, *extents, x.dtype, options.recipe.fp8_combine)
    of_parts = sizes_of_parts(tokens, parts or 1)
    return [whole] if len(of_parts) == 1 else [exchange(tokens) for tokens in of_parts]


def expert_spec(
    options: LayerOptions,
    exchanges: Sequence[Exchange],
    num_experts: int,
    x: jax.Array,
    w_gate_up: Weights,
    w_down: Weights,
) -> ExpertSpec:
    """Returns the spec of a layer of num_experts experts on all devices.

    exchanges: of each part. The extents of x and of the weights do not matter here.
    """
    num_local_experts = num_experts // exchanges[0].size
    check_num_experts(OP, num_local_experts, w_gate_up)
    how = options.recipe, options.implementation, options.activation
    products = make_specs(OP, x, w_gate_up, w_down, *how)
    # No result of turn.py has anything of a row of no group. But these options of JAX look at what
    # the forward pass keeps.
    looks = any(getattr(jax.config, f"jax_debug_{name}", False) for name in ("nans", "infs"))
    products = products._replace(unused_rows="zero" if looks else "undefined")
    tokens = sum(exchange.tokens for exchange in exchanges)
    capacity = options.capacity(tokens * exchanges[0].top_k, num_experts)
    most = None if capacity is None else num_experts * capacity
    has_parts = len(exchanges) > 1
    num_strips = 1 if has_parts else count_strips(exchanges[0], num_local_experts, x)
    parts = (
        PartSpec(exchange, *_rows(exchange, most, has_parts), num_strips) for exchange in exchanges
    )
    return ExpertSpec(products, num_local_experts, tuple(parts))


def _rows(exchange: Exchange, most: int | None, has_parts: bool) -> tuple[int, bool]:
    """Returns the rows of a turn, and whether they are always enough.

    most: how many rows a device gets of all parts, if a capacity says so.
    """
    # Not min(top_k, num_local_experts): a router may choose an expert twice for a token.
    of_tokens = exchange.received * exchange.top_k
    most_of_part = of_tokens if most is None else min(of_tokens, most)
    # One part may get all rows that the capacity allows: room for them in each would be waste.
    if most is not None and not has_parts:
        return most_of_part, True
    expected = exchange.tokens * exchange.top_k
    rows = max(math.ceil(_HEADROOM * expected / _ROW_UNIT) * _ROW_UNIT, _MIN_ROWS)
    return (rows, False) if rows < most_of_part else (most_of_part, True)
