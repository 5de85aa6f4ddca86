"""Measures cases one by one: a line of the table and fresh JSON files after each."""

import contextlib
import dataclasses
import gc
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.case import Build, Case
from benchmarks.footer import footer
from benchmarks.report import Row, Table, document, write_json
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.rounds import Rounds, Timing, measure, measure_rounds
from benchmarks.timing.timer import Call

_COPY_BYTES = 2 << 30
_OURS = ""  # among the names of peers
_MAX_REASON = 200  # characters


@dataclasses.dataclass(frozen=True)
class Device:
    """What the floors are computed from."""

    name: str
    num_sms: int
    copy_gbps: float


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure.

    rounds: how each row's calls are timed beside each other.
    peers: names of the implementations to time beside ours; None for all that a case has.
    files: JSON files to write.
    is_together: whether the calls of a row are in memory at the same time; else one after another.
    notes: what the files say of the whole run.
    """

    rounds: Rounds = Rounds()
    peers: Sequence[str] | None = None
    files: Sequence[pathlib.Path] = ()
    is_together: bool = True
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The rows, and those that our own kernels did not run."""

    rows: list[Row]
    failed: list[dict[str, Any]]


def run(family: str, cases: Sequence[Case], options: Options, device: Device) -> Outcome:
    """Measures every case and prints the table and its footer. A case that fails is left out."""
    names = _peer_names(cases, options)
    table = Table(list(dict.fromkeys(key for case in cases for key in case.labels)), names)
    tqdm.write(table.header())
    outcome = Outcome([], [])
    how = {
        "rounds": options.rounds.num_rounds,
        "calls": options.rounds.num_calls,
        "seed": options.rounds.seed,
        "copy_gbps": round(device.copy_gbps),
        **options.notes,
    }
    start = time.perf_counter()
    for i, case in enumerate(_progress(cases, family)):
        try:
            row = _measure_case(family, case, options, device, i)
        except Exception as error:  # the other rows are still worth having
            outcome.failed.append({"family": family, **case.labels, "error": reason_of(error)})
            tqdm.write(f"failed: {outcome.failed[-1]}")
        else:
            outcome.rows.append(row)
            tqdm.write(table.line(row))
        _free_memory()
        for file in options.files:
            write_json(file, document(device.name, how, outcome.rows, outcome.failed))
    seconds = time.perf_counter() - start
    for line in footer(outcome.rows, device.name, device.copy_gbps, device.num_sms):
        print(line)
    print(f"{family}: {len(cases)} rows in {seconds:.0f} s, {seconds / len(cases):.1f} s a row")
    return outcome


def _peer_names(cases: Sequence[Case], options: Options) -> list[str]:
    names = dict.fromkeys(name for case in cases for name in case.peers)
    return [name for name in names if options.peers is None or name in options.peers]


def _progress(cases: Sequence[Case], family: str) -> Any:
    is_shown = sys.stderr.isatty()
    return tqdm(cases, desc=f"bench {family}", unit="row", leave=False, disable=not is_shown)


def _measure_case(family: str, case: Case, options: Options, device: Device, i: int) -> Row:
    builds: dict[str, Build] = {_OURS: case.build}
    names = _peer_names([case], options)
    builds |= {name: case.peers[name] for name in names}
    timings, figures, seconds = {}, {}, [0.0, 0.0]
    absent: dict[str, str] = {}
    together = [builds] if options.is_together else [{n: b} for n, b in builds.items()]
    for some in together:
        start = time.perf_counter()
        calls, reasons = _built(some)
        built = time.perf_counter()
        timings |= measure_rounds(calls, options.rounds, i)
        figures |= _figures(calls)
        absent |= reasons
        seconds = [seconds[0] + built - start, seconds[1] + time.perf_counter() - built]
    ours = timings.pop(_OURS)
    if isinstance(ours, Exception):
        raise ours
    peers = {name: t for name, t in timings.items() if isinstance(t, Timing)}
    absent |= {name: reason_of(t) for name, t in timings.items() if isinstance(t, Exception)}
    return Row(
        family=family,
        labels=case.labels,
        shape=case.shape,
        work=case.work,
        hbm_fraction=case.work.hbm_floor_us(device.copy_gbps) / ours.us,
        tensor_fraction=case.work.tensor_floor_us(device.num_sms) / ours.us,
        config=case.config,
        ours=ours,
        peers=peers,
        absent=absent,
        extra={
            **figures,
            "build_seconds": round(seconds[0], 2),
            "time_seconds": round(seconds[1], 2),
        },
    )


def _built(builds: Mapping[str, Build]) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls, and why a peer has none. Raises: what our own build raises."""
    calls: dict[str, Call] = {}
    absent: dict[str, str] = {}
    for name, build in builds.items():
        try:
            calls[name] = build()
        except Exception as error:  # other people's code: absent, refusing the shape
            if name == _OURS:
                raise
            absent[name] = reason_of(error)
    return calls, absent


def _figures(calls: Mapping[str, Call]) -> dict[str, Any]:
    """What is known of the programs beside their times; keys of peers begin with their names."""
    figures: dict[str, Any] = {}
    for name, call in calls.items():
        prefix = f"{name}_" if name else ""
        if call.peak_bytes is not None:
            figures[f"{prefix}peak_bytes"] = call.peak_bytes
        if call.moved_bytes is not None:
            figures[f"{prefix}moved_bytes"] = dict(call.moved_bytes)
        if call.products_beside is not None:
            figures[f"{prefix}products_beside"] = dict(call.products_beside)
    return figures


def reason_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_MAX_REASON]


def _free_memory() -> None:
    """What the calls of a row held goes back, so that the next row's may have it."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None:
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()


def copy_gbps() -> float:
    """Bytes read and written by a large device-to-device copy, over its time."""
    source = jnp.ones(_COPY_BYTES // 4, jnp.float32)
    copy = jax.jit(jnp.copy)
    return 2 * _COPY_BYTES / measure(Call(lambda: copy(source), jax_queue())).us / 1e3
