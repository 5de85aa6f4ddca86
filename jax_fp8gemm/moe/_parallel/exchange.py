"""make_exchange: the exchange of a layer, by name or by what it costs.

all_gather         every token goes to every device
all_to_all         each device sends the same number of rows to each other one in a turn; tokens
                   that find no room go in a further turn
ragged_all_to_all  only those tokens travel that a device needs

Along a pair of mesh axes there may be one for each axis: see hierarchy.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from jax_fp8gemm.moe._parallel.exchange_kinds import (
    AllGather,
    AllToAll,
    AxisName,
    Exchange,
    RaggedAllToAll,
)
from jax_fp8gemm.moe._parallel.hierarchy import Hierarchy

Name = Literal["all_gather", "all_to_all", "ragged_all_to_all"]
NAMES: tuple[Name, ...] = ("all_gather", "all_to_all", "ragged_all_to_all")
# Along the first axis of a pair, and along the second.
NamePair: TypeAlias = tuple[Name | None, Name | None]


class Rate(NamedTuple):
    """How fast an exchange is.

    Attributes:
      bytes_per_second: what a device receives.
      source: where the number is from.
    """

    bytes_per_second: float
    source: str


# Of XLA's collectives in one host of 4 H200s with jax 0.11.2. All choices follow from these.
RATES: Mapping[Name, Rate] = {
    "all_gather": Rate(281e9, "4 GPUs, FP8, 235 MB gathered"),
    "all_to_all": Rate(270e9, "4 GPUs, bf16, 117 MB each; FP8, 59 MB: 219"),
    "ragged_all_to_all": Rate(158e9, "4 GPUs, 64 updates, packing included; all_to_all then 221"),
}
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
    needed: float | None = None,
) -> Exchange:
    """Returns the exchange of this name; None stands for the one that `choose_exchange` names.

    Args:
      max_slots: the most tokens that a device sends to another one, whatever the choices. The
        exchange then has one turn. None: there is no such bound, and a turn of all_to_all has as
        many slots as `needed` tokens take.
      needed: how many of its tokens a device is expected to send to each device. None: as many as
        evenly spread choices name.
    """
    needed = needed_share(size, top_k) * tokens if needed is None else needed
    slots = _slots(needed, tokens) if max_slots is None else min(max_slots, tokens)
    name = name or choose_exchange(slots, tokens)
    if name != "all_to_all":
        slots = tokens
    has_one_turn = max_slots is not None or slots == tokens
    return _CLASSES[name](axis, size, tokens, top_k, slots, has_one_turn)


def make_hierarchy(
    names: NamePair,
    axes: tuple[str, str],
    sizes: tuple[int, int],
    tokens: int,
    top_k: int,
    max_slots: int | None = None,
    host_share: float = 1.0,
) -> Hierarchy:
    """Returns an exchange along a pair of axes, hosts and the devices of each.

    Args:
      names: of the exchange along each axis, as for make_exchange.
      max_slots: as for make_exchange, of one device to another one anywhere.
      host_share: a bound of the expected share of tokens that need a given host.
    """
    hosts, local = sizes
    most = lambda devices: None if max_slots is None else devices * max_slots
    needed = min(host_share, needed_share(hosts, top_k)) * tokens
    outer = make_exchange(names[0], axes[0], hosts, tokens, top_k, most(local), needed)
    if isinstance(outer, RaggedAllToAll):
        outer = replace(outer, crosses_hosts=True)
    # A device passes on what came from its like in each host.
    needed = needed_share(hosts * local, top_k) * hosts * tokens
    inner = make_exchange(names[1], axes[1], local, outer.received, top_k, most(hosts), needed)
    return Hierarchy.of(outer, inner)


def choose_exchange(slots: int, tokens: int) -> Name:
    """Returns the faster one of all_gather and all_to_all, by the rows that each moves to a device.

    all_gather moves `tokens`, and all_to_all `slots`. ragged_all_to_all is for callers that name
    it: without its kernel, which writes into the memory of at most 8 peers, XLA refused it or did
    not end (docs/sharding.md).
    """
    rows: dict[Name, int] = {"all_gather": tokens, "all_to_all": slots}
    return min(rows, key=lambda name: rows[name] / RATES[name].bytes_per_second)


def needed_share(size: int, top_k: int) -> float:
    """Returns the share of tokens with evenly spread choices that need a given one of `size`."""
    return 1 - (1 - 1 / size) ** top_k


def _slots(needed: float, tokens: int) -> int:
    """Returns the slots for so many tokens, with headroom; at most all tokens."""
    return min(math.ceil(HEADROOM * needed / _SLOT_UNIT) * _SLOT_UNIT, tokens)
