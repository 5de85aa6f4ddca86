"""The exchange of tokens along one axis, in the model of model.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.scaling.model import Axis, Number, Rates
from jax_fp8gemm.moe._parallel.exchange import HEADROOM, Name


def token_bytes(hidden: int, top_k: int, is_fp8: bool) -> int:
    """A token as it is dispatched: values, scales, and of each choice an index and a weight."""
    values = hidden + 4 * -(-hidden // 128) if is_fp8 else 2 * hidden
    return values + 8 * top_k


def copies(strategy: Name, p: int, top_k: int, headroom: Number) -> float:
    """How many peers a token is sent to, of the p - 1 others of the expert axis.

    headroom: of all_to_all, whose slots have a fixed size.
    """
    fraction = 1 - (1 - 1 / p) ** top_k  # of devices that hold one of its experts
    share = {"all_gather": 1.0, "all_to_all": min(1.0, headroom * fraction)}
    return (p - 1) * share.get(strategy, fraction)


def crossover(top_k: int, headroom: Number) -> int:
    """The largest expert axis on which all_gather moves no more than all_to_all."""
    moves_all = lambda p: copies("all_to_all", p, top_k, headroom) >= p - 1
    # From p > top_k * headroom on, headroom * fraction < headroom * top_k / p < 1.
    return max(p for p in range(1, 1 + math.ceil(top_k * headroom)) if moves_all(p))


@dataclass(frozen=True)
class Exchange:
    """Into one device, over both passes: x and dout are dispatched, results and dx come back.

    network_bytes: of both, what comes from other hosts.
    """

    dispatch_bytes: float
    return_bytes: float
    seconds: float
    network_bytes: float


def exchange(
    strategy: Name,
    axis: Axis,
    hidden: int,
    top_k: int,
    tokens: int,
    rates: Rates,
    *,
    is_fp8: bool = True,
    headroom: Number = HEADROOM,
) -> Exchange:
    sent = tokens * copies(strategy, axis.size, top_k, headroom)
    x = token_bytes(hidden, top_k, is_fp8)
    dispatch = sent * (x + x - 8 * top_k)
    returned = sent * 2 * (2 * hidden)
    is_ragged = strategy == "ragged_all_to_all"
    local_gbps = rates.ragged_all_to_all_gbps if is_ragged else rates.all_to_all_gbps
    seconds = axis.exchange_seconds(returned, local_gbps, rates)
    if strategy == "all_gather":
        whole = axis.size / max(axis.size - 1, 1)  # a gather counts a device's own part too
        seconds += axis.gather_seconds(dispatch * whole, rates)
        crossing = (dispatch / axis.local + returned) * axis.elsewhere
    else:
        seconds += axis.exchange_seconds(dispatch, local_gbps, rates)
        crossing = (dispatch + returned) * axis.elsewhere
    return Exchange(dispatch, returned, seconds, crossing)
