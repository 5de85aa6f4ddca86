"""The tables of docs/scaling.md on the exchange along hosts and their devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.scaling.exchanges import copies, exchange
from benchmarks.scaling.hierarchy import crossing_rows, pair_exchange
from benchmarks.scaling.model import Axis, Model, Rates
from benchmarks.scaling.plan import Work, best_plan
from jax_fp8gemm.moe._parallel.exchange import HEADROOM

MAX_HOSTS = 4  # DeepSeek-V3's routing: experts of a token are in at most 4 hosts

Table = tuple[Sequence[str], Sequence[Sequence[object]]]


def hosts_table(tokens: int) -> Table:
    """Of one layer, with the experts over some hosts."""
    model, rates = Model(), Rates()
    sizes = model.hidden, model.top_k, tokens, rates

    def row(hosts: int) -> Iterator[object]:
        axis = Axis(hosts * rates.gpus_per_host, rates.gpus_per_host)
        flat = exchange("all_to_all", axis, *sizes)
        limits = (None, MAX_HOSTS)
        pairs = [pair_exchange(axis, *sizes, max_hosts=limit) for limit in limits]
        moved = [flat, *pairs]
        yield from (axis.size, hosts)
        yield f"{copies('all_to_all', axis.size, model.top_k, HEADROOM) * axis.elsewhere:.2f}"
        for limit in limits:
            yield f"{crossing_rows(axis, model.top_k, 1, HEADROOM, limit):.2f}"
        yield from (f"{one.network_bytes / 1e6:.0f}" for one in moved)
        yield from (f"{one.seconds * 1e3:.1f}" for one in moved)

    ways = ("one axis", "pair", f"pair, at most {MAX_HOSTS} hosts")
    header = ["p", "hosts"]
    header += [f"{way}, {unit}" for unit in ("copies", "MB", "ms") for way in ways]
    return header, [list(row(hosts)) for hosts in (2, 4, 8, 16, 32)]


def pairs_table(tokens: int, devices: Sequence[int]) -> Table:
    """Of a whole step, by the best layout for each exchange."""
    base = Work(tokens)
    pair = replace(base, has_pair=True)
    works = (base, pair, replace(pair, max_hosts=MAX_HOSTS))

    def row(num_devices: int) -> Iterator[object]:
        plans = [best_plan(num_devices, work, tensor=1) for work in works]
        yield num_devices
        for p in plans:
            yield f"{p.layout.fsdp_outer} x {p.layout.expert} x {p.layout.fsdp_inner}"
        yield from (f"{p.exchange.network_bytes / 1e9:.0f}" for p in plans)
        yield from (f"{p.exchange.seconds:.2f}" for p in plans)
        yield from (f"{p.seconds:.2f}" for p in plans)
        yield from (f"{p.flop / p.seconds / 1e12:.0f}" for p in plans)

    ways = ("one axis", "pair", f"pair, at most {MAX_HOSTS} hosts")
    units = ("", ", tokens GB", ", exchange s", ", step s", ", TFLOPS")
    header = ["GPUs", *(f"{way}{unit}" for unit in units for way in ways)]
    return header, [list(row(num_devices)) for num_devices in devices]
