"""The exchange along a pair of axes, hosts and their devices, in the model of model.py.

A token goes once to each host that needs it, over the network, and on to the devices by NVLink.
"""

from __future__ import annotations

from benchmarks.scaling.exchanges import Exchange, token_bytes
from benchmarks.scaling.model import Axis, Number, Rates
from jax_fp8gemm.moe._parallel.exchange import HEADROOM, needed_share


def host_share(hosts: int, top_k: int, max_hosts: int | None) -> float:
    """The share of tokens that need a given host; max_hosts: the most that a token may need."""
    share = needed_share(hosts, top_k)
    return share if max_hosts is None else min(share, max_hosts / hosts)


def crossing_rows(
    axis: Axis, top_k: int, tokens: int, headroom: Number, max_hosts: int | None
) -> float:
    """Rows that come to a device from other hosts, in the slots of all_to_all."""
    hosts = axis.size // axis.local
    share = min(1.0, headroom * host_share(hosts, top_k, max_hosts))
    return (hosts - 1) * share * tokens


def pair_exchange(
    axis: Axis,
    hidden: int,
    top_k: int,
    tokens: int,
    rates: Rates,
    *,
    is_fp8: bool = True,
    headroom: Number = HEADROOM,
    max_hosts: int | None = None,
) -> Exchange:
    """Returns all_to_all over hosts with the faster exchange in a host, one after the other."""
    hosts, local = axis.size // axis.local, axis.local
    crossing = crossing_rows(axis, top_k, tokens, headroom, max_hosts)
    there, back = 2 * token_bytes(hidden, top_k, is_fp8) - 8 * top_k, 2 * (2 * hidden)
    # The plan of the inner exchange needs the devices of the choices, before anything else.
    network = crossing * (there + 4 * top_k + back)
    received = hosts / (hosts - 1) * crossing
    slots = headroom * needed_share(axis.size, top_k) * hosts * tokens
    gbps, gather_gbps = rates.all_to_all_gbps, rates.gather_gbps
    # Rows that a device gets of each other one in its host, and nanoseconds of each.
    by_slots = min(slots, received), (there + back) / gbps
    by_gather = received, there / gather_gbps + back / gbps
    rows, ns = min(by_slots, by_gather, key=lambda way: way[0] * way[1])
    rows *= local - 1
    seconds = network / rates.network_gbps / 1e9 + rows * ns / 1e9
    dispatch = crossing * (there + 4 * top_k) + rows * there
    return Exchange(dispatch, (crossing + rows) * back, seconds, network)
