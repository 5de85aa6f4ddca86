"""make_exchange: the exchange of a layer, by name or by what it costs.

all_gather         every token goes to every device
all_to_all         each device sends the same number of rows to each other one in a turn; tokens
                   that find no room go in a further turn
ragged_all_to_all  only those tokens travel that a device needs
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from jax_fp8gemm.moe._parallel.exchange_kinds import (
    AllGather,
    AllToAll,
    AxisName,
    Exchange,
    RaggedAllToAll,
)

Name = Literal["all_gather", "all_to_all", "ragged_all_to_all"]
NAMES: tuple[Name, ...] = ("all_gather", "all_to_all", "ragged_all_to_all")

# Bytes/s that a device receives through XLA's collectives, measured on one host of 4 H200s with jax
# 0.11.2: 235 MB gathered in FP8, and 117 MB exchanged in bf16.
RATES = {"all_gather": 281e9, "all_to_all": 270e9, "ragged_all_to_all": 6e9}
HEADROOM = 1.125  # the slots of a turn, over those that evenly spread choices need
_SLOT_UNIT = 128

_CLASSES: dict[str, Callable[..., Exchange]] = dict(
    zip(NAMES, (AllGather, AllToAll, RaggedAllToAll), strict=True)
)


def make_exchange(
    name: Name | None,
    axis: AxisName,
    size: int,
    tokens: int,
    top_k: int,
    max_slots: int | None = None,
) -> Exchange:
    """Returns the exchange of this name; None stands for the one that `choose_exchange` names.

    max_slots: the most tokens that a device sends to another one, whatever the choices. The
      exchange then has one turn. None: there is no such bound, and a turn of all_to_all has as many
      slots as evenly spread choices need.
    """
    slots = _expected_slots(size, tokens, top_k) if max_slots is None else min(max_slots, tokens)
    name = name or choose_exchange(slots, tokens)
    if name != "all_to_all":
        slots = tokens
    has_one_turn = max_slots is not None or slots == tokens
    return _CLASSES[name](axis, size, tokens, top_k, slots, has_one_turn)


def choose_exchange(slots: int, tokens: int) -> Name:
    """Returns the name of the faster exchange: all_to_all moves `slots` rows, all_gather `tokens`.

    ragged_all_to_all is never chosen. It moves the fewest rows, but within one host at 2 % of the
    rate of the others.
    """
    gathered, exchanged = tokens / RATES["all_gather"], slots / RATES["all_to_all"]
    return "all_to_all" if exchanged < gathered else "all_gather"


def _expected_slots(size: int, tokens: int, top_k: int) -> int:
    """Returns the slots that evenly spread choices need, with headroom; at most all tokens."""
    share = 1 - (1 - 1 / size) ** top_k
    slots = math.ceil(HEADROOM * share * tokens / _SLOT_UNIT) * _SLOT_UNIT
    return min(slots, tokens)
