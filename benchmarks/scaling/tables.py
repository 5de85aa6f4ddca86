"""Writes the tables of docs/scaling.md: python -m benchmarks.scaling.tables FILE"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from benchmarks.scaling.exchanges import crossover, exchange
from benchmarks.scaling.hierarchy_tables import hosts_table, pairs_table
from benchmarks.scaling.model import Axis, Model, Rates
from benchmarks.scaling.plan import STATE_BYTES, Plan, Work, best_plan
from benchmarks.scaling.predict import layer_seconds_in_parts
from jax_fp8gemm.moe._parallel.exchange import HEADROOM, NAMES, RATES, Name
from jax_fp8gemm.moe._parallel.parts import NUMBERS

_DEVICES = (64, 128, 256, 512, 1024, 2048)
_TOKENS = 8192
_MODEL, _RATES = Model(), Rates()


def fill(text: str) -> str:
    """`text` with the table of each name put between its two comments."""
    tables = dict(
        model=_model,
        rates=_rates,
        exchange=_exchange,
        hosts=lambda: _table(*hosts_table(_TOKENS)),
        parts=_parts,
        hidden=_hidden,
        plan=_plan,
        change=_change,
        pairs=lambda: _table(*pairs_table(_TOKENS, _DEVICES)),
    )

    def table(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{tables[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])


def _model() -> str:
    billions = lambda weights: f"{weights / 1e9:.2f}"
    gflop = lambda weights: f"{6 * weights / 1e9:.1f}"
    m = _MODEL
    active = m.num_moe_layers * m.top_k * m.expert_weights
    attention = m.attention_flop(4096) / 1e9
    total = 6 * (active + m.dense_weights + m.head_weights) / 1e9 + attention
    rows = [
        ("routed experts", billions(m.routed_weights), gflop(active)),
        ("attention, shared expert, router, dense MLPs",
         billions(m.dense_weights), gflop(m.dense_weights)),
        ("head and embedding", billions(2 * m.head_weights), gflop(m.head_weights)),
        ("scores and values, sequences of 4096", "", f"{attention:.1f}"),
        ("all", billions(m.num_weights), f"{total:.1f}"),
    ]  # fmt: skip
    return _table(("part", "weights, 10^9", "GFLOP a token, both passes"), rows)


def _rates() -> str:
    r = _RATES
    rows = [
        ("SwiGLU MLP, FP8", f"{r.dense_tflops} TFLOPS", "`matmul.json`"),
        ("experts", f"{r.expert_tflops} TFLOPS, and {r.weight_ps} ps for each weight held",
         "two layers of `bench moe`, 2026-11-29 (e452810)"),
        ("head, bf16", f"{r.bf16_tflops} TFLOPS", "Llama-3-70B MLP in XLA"),
        ("attention", f"{r.attention_tflops} TFLOPS", "assumed"),
        ("`all_gather`, `reduce_scatter`, one host", f"{r.gather_gbps} GB/s a GPU",
         RATES["all_gather"].source),
        ("`all_to_all`, one host", f"{r.all_to_all_gbps} GB/s a GPU",
         RATES["all_to_all"].source),
        ("`ragged_all_to_all`, one host", f"{r.ragged_all_to_all_gbps} GB/s a GPU",
         RATES["ragged_all_to_all"].source),
        ("network", f"{r.network_gbps} GB/s a GPU", "assumed: 80 % of 400 Gb/s"),
        ("GPUs of a host", r.gpus_per_host, ""),
        ("headroom of `all_to_all`'s slots", HEADROOM, "`moe/_parallel/exchange.py`"),
    ]  # fmt: skip
    return _table(("", "rate", "from"), rows)


def _exchange() -> str:
    """Of one layer, inside a host and with one device of the expert axis in each host."""

    def row(p: int):
        yield p
        for is_fp8 in (True, False):
            for strategy in NAMES:
                moved = exchange(strategy, Axis(p, 1), _MODEL.hidden, _MODEL.top_k, _TOKENS,
                                 _RATES, is_fp8=is_fp8)  # fmt: skip
                yield f"{(moved.dispatch_bytes + moved.return_bytes) / 1e6:.0f}"
        for local in (p, 1):
            for strategy in NAMES[:2]:
                axis = Axis(p, local)
                moved = exchange(strategy, axis, _MODEL.hidden, _MODEL.top_k, _TOKENS, _RATES)
                yield f"{moved.seconds * 1e3:.1f}" if local <= _RATES.gpus_per_host else ""

    short = ("gather", "slots", "ragged")
    header = ["p", *(f"{name}, {kind} MB" for kind in ("FP8", "bf16") for name in short)]
    header += [f"{name}, {where} ms" for where in ("host", "network") for name in short[:2]]
    return _table(header, (list(row(p)) for p in (2, 4, 8, 16, 32, 64)))


def _parts() -> str:
    """Of one layer, within a host and with eight devices of the expert axis in each."""

    def row(p: int):
        axis = Axis(p, min(p, _RATES.gpus_per_host))
        strategy: Name = "all_gather" if p <= crossover(_MODEL.top_k, HEADROOM) else "all_to_all"
        moved = exchange(strategy, axis, _MODEL.hidden, _MODEL.top_k, _TOKENS, _RATES)
        yield from (p, f"`{strategy}`", f"{moved.seconds * 1e3:.1f}")
        for num_parts in NUMBERS:
            how = strategy, axis, _TOKENS, _MODEL, _RATES
            yield f"{layer_seconds_in_parts(num_parts, *how) * 1e3:.1f}"

    header = ("p", "exchange", "exchange ms", *(f"layer ms, parts={c}" for c in NUMBERS))
    return _table(header, (list(row(p)) for p in (2, 4, 8, 16, 32, 64)))


def _hidden() -> str:
    """Tokens a device from which products take as long as what they wait for."""
    rate = _RATES.dense_tflops * 1e12

    def rows():
        for where, gbps in (("host", _RATES.gather_gbps), ("network", _RATES.network_gbps)):
            for kind, gathered in (("FP8", 1), ("bf16", 2)):
                # Forward 2 FLOP a weight and token; backward 4, and gradients in f32.
                forward = gathered * rate / (2 * gbps * 1e9)
                backward = (gathered + 4) * rate / (4 * gbps * 1e9)
                yield where, kind, f"{forward:.0f}", f"{backward:.0f}"

    return _table(("gathered over", "as", "forward", "backward"), rows())


def _plan() -> str:
    header = (
        *("GPUs", "fsdp x expert x fsdp", "state GB (f32, bf16)", "weights GB", "dispatch GB"),
        *("return GB", "compute s", "gather s", "exchange s", "step s", "all hidden s"),
        *("TFLOPS", "bf16 moves"),
    )
    return _table(header, (_plan_row(n) for n in _DEVICES))


def _plan_row(num_devices: int) -> list[object]:
    work = Work(_TOKENS)
    p = best_plan(num_devices, work, tensor=1)
    slower = best_plan(num_devices, replace(work, is_fp8=False), tensor=1).seconds / p.seconds
    gigabytes = lambda num_bytes: f"{num_bytes / 1e9:.0f}"
    state = [gigabytes(size * _MODEL.num_weights / num_devices) for size in STATE_BYTES.values()]
    seconds = p.compute_seconds, p.gather_seconds, p.exchange.seconds
    return [
        num_devices,
        f"{p.layout.fsdp_outer} x {p.layout.expert} x {p.layout.fsdp_inner}",
        ", ".join(state),
        *map(gigabytes, (p.gathered_bytes, p.exchange.dispatch_bytes, p.exchange.return_bytes)),
        *(f"{x:.2f}" for x in (*seconds, p.seconds, p.all_hidden_seconds)),
        _tflops(p),
        f"{slower:.2f}x",
    ]


def _tflops(p: Plan) -> str:
    return f"{p.flop / p.seconds / 1e12:.0f}"


def _change() -> str:
    base = Work(_TOKENS)
    changes = {
        "as above": base,
        "tokens and weights travel in bf16": replace(base, is_fp8=False),
        "gradients summed in bf16": replace(base, grad_bytes=2),
        "slots without headroom": replace(base, headroom=1),
        "network at 50 GB/s": replace(base, rates=replace(_RATES, network_gbps=50)),
        "4096 tokens a GPU": replace(base, tokens=4096),
        "16384 tokens a GPU": replace(base, tokens=16384),
    }
    plans = {name: best_plan(512, work, tensor=1) for name, work in changes.items()}
    plans["tensor parallelism over 8"] = best_plan(512, base, tensor=8)
    rows = [
        (name, f"{p.layout.fsdp_outer} x {p.layout.expert} x {p.layout.fsdp_inner}",
         f"{p.seconds:.2f}", _tflops(p))
        for name, p in plans.items()
    ]  # fmt: skip
    return _table(("changed", "fsdp x expert x fsdp", "step s", "TFLOPS"), rows)


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    path.write_text(fill(path.read_text()))


if __name__ == "__main__":
    main()
