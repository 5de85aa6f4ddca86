"""Measures cases one by one: a line of the table and a fresh JSON file after each."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.case import Build, Case
from benchmarks.peers.dense import peer_calls
from benchmarks.problem import Shape
from benchmarks.reference import CALIBRATION, CARRIED, Reference, summarise
from benchmarks.report import Row, Table, document, write_json
from benchmarks.timing.timer import Call, Timing, jax_queue, measure

_COPY_BYTES = 2 << 30
# Keys in a row's JSON; for a peer, after the first word of its name.
_PEAK, _MOVED = "peak_bytes", "moved_bytes"
_DIMENSIONS = (
    *("m", "n", "k", "hidden", "inter"),
    *("name", "groups", "expected_rows", "rows", "max_m", "expected_k", "gpus"),
    *("experts", "top_k"),
)


@dataclasses.dataclass(frozen=True)
class Device:
    """What the floors are computed from."""

    name: str
    num_sms: int
    copy_gbps: float


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure.

    table: the reference's table to compare with, e.g. "dense_sustained".
    time: measures one call.
    peers: names of the implementations to time beside ours.
    files: JSON files to write.
    """

    table: str
    time: Callable[[Call], Timing]
    peers: Sequence[str] = ()
    files: Sequence[pathlib.Path] = ()
    reference: Reference | None = None


def run(family: str, cases: Sequence[Case], options: Options, device: Device) -> list[Row]:
    """Measures every case, prints the table and its footer, and returns the rows."""
    names = [name for name in options.peers if any(name in case.peers for case in cases)]
    table = Table(list(cases[0].labels), names)
    tqdm.write(table.header())
    rows: list[Row] = []
    notes: dict[str, str] = {}
    machine = _machine_factor(options, notes) if options.table in CARRIED and names else None
    for case in tqdm(cases, desc=f"bench {family}", unit="row", leave=False):
        rows.append(_measure_case(family, case, options, device, machine, notes))
        tqdm.write(table.line(rows[-1]))
        for file in options.files:
            write_json(file, document(device.name, device.copy_gbps, rows))
    for line in [*_footer(rows, device), *(f"{name}: {note}" for name, note in notes.items())]:
        print(line)
    return rows


def _measure_case(
    family: str,
    case: Case,
    options: Options,
    device: Device,
    machine: float | None,
    notes: dict[str, str],
) -> Row:
    figures: dict[str, Any] = {}
    ours = _time(case.build, options, "", figures)
    peers = _time_peers(case.peers, options, notes, figures)
    estimate = None
    if options.reference is not None:
        estimate = options.reference.deepgemm_us(
            options.table, case.shape, peers, machine, case.work.flop
        )
    return Row(
        family=family,
        labels=case.labels,
        shape=case.shape,
        us=ours.us,
        tflops=case.work.tflops(ours.us),
        gbps=case.work.gbps(ours.us),
        hbm_fraction=case.work.hbm_floor_us(device.copy_gbps) / ours.us,
        tensor_fraction=case.work.tensor_floor_us(device.num_sms) / ours.us,
        config=case.config,
        peers=peers,
        deepgemm_estimate=estimate,
        extra={
            "other_us": round(ours.other_us, 3),
            "timer": ours.timer,
            "sm_mhz": ours.sm_mhz,
            **figures,
        },
    )


def _time(build: Build, options: Options, prefix: str, figures: dict[str, Any]) -> Timing:
    """Times a call, and puts what else is known of it into `figures`."""
    call = build()
    if call.peak_bytes is not None:
        figures[prefix + _PEAK] = call.peak_bytes
    if call.moved_bytes is not None:
        figures[prefix + _MOVED] = dict(call.moved_bytes)
    return options.time(call)


def _time_peers(
    builds: Mapping[str, Build], options: Options, notes: dict[str, str], figures: dict[str, Any]
) -> dict[str, float]:
    times = {}
    for name in options.peers:
        if name not in builds:
            continue
        prefix = f"{name.split('_')[0]}_"
        try:
            times[name] = _time(builds[name], options, prefix, figures).us
        except Exception as error:  # other people's code: absent, refusing the shape, out of memory
            text = str(error).strip().splitlines() or [""]
            notes.setdefault(name, f"not timed everywhere: {type(error).__name__}: {text[0][:160]}")
    return times


def _machine_factor(options: Options, notes: dict[str, str]) -> float | None:
    """cuBLASLt's time here over the reference machine's, for rows it was not timed on there."""
    if options.reference is None:
        return None
    measured: dict[Shape, float] = {}
    for shape in CALIBRATION:
        name = "cublaslt_tensorwise"
        build = peer_calls(shape, is_1d1d=False)[name]
        times = _time_peers({name: build}, options, notes, {})
        if name in times:
            measured[shape] = times[name]
    return options.reference.machine_factor(measured)


def _footer(rows: Sequence[Row], device: Device) -> list[str]:
    lines = [
        f"{device.name}: floors at {device.copy_gbps:.0f} GB/s (a copy, measured now) and "
        f"{device.num_sms} SMs * 8192 FLOP/clock * 1.83 GHz; a peer's ratio is its time over ours"
    ]
    if any(row.extra["timer"] == "host" for row in rows):
        lines.append(
            "NOTE: no CUPTI, so these are host times of calls queued back to back without a flush: "
            "short rows show the launch, not the kernel"
        )
    if any(row.extra["other_us"] > 0.02 * row.us for row in rows):
        most = max(rows, key=lambda row: row.extra["other_us"])
        lines.append(
            f"us counts our kernel alone; XLA ran up to {most.extra['other_us']:.2f} us of others"
        )
    peaks = _program_lines(rows, "peak memory of", _PEAK, lambda value: f"{value / 1e9:.2f}")
    return lines + compare(rows) + peaks + _program_lines(rows, "moved by", _MOVED, _moved_text)


def _program_lines(
    rows: Sequence[Row], what: str, key: str, text_of: Callable[[Any], str]
) -> list[str]:
    """A figure of each program, ours and the peers', where it is known."""
    lines = []
    for row in rows:
        texts = [
            f"{name.removesuffix(key).removesuffix('_') or 'ours'} {text_of(value)}"
            for name, value in row.extra.items()
            if name.endswith(key)
        ]
        if texts:
            title = f"{row.labels.get('name', row.shape)}{_variant(row)}"
            lines.append(f"{what} {title}, GB: {', '.join(texts)}")
    return lines


def _moved_text(moved: Mapping[str, int]) -> str:
    """Without what rounds to nothing."""
    texts = [f"{kind} {count / 1e9:.3f}" for kind, count in moved.items() if count >= 5e5]
    return f"[{'; '.join(texts)}]"


def compare(rows: Sequence[Row]) -> list[str]:
    """Our speed over each peer's (its time over ours), by size class."""
    lines = []
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    for name in [*names, "deepgemm_estimate"]:
        for variant in sorted({_variant(row) for row in rows}):
            ratios = {
                row.shape: us / row.us
                for row in rows
                if _variant(row) == variant
                and (us := {**row.peers, "deepgemm_estimate": row.deepgemm_estimate}.get(name))
            }
            lines += summarise(ratios, f"{name}{variant}")
    return lines


def _variant(row: Row) -> str:
    """What tells apart rows of one shape."""
    text = [f"{key}={value}" for key, value in row.labels.items() if key not in _DIMENSIONS]
    return f" ({', '.join(text)})" if text else ""


def copy_gbps() -> float:
    """Bytes read and written by a large device-to-device copy, over its time."""
    source = jnp.ones(_COPY_BYTES // 4, jnp.float32)
    copy = jax.jit(jnp.copy)
    return 2 * _COPY_BYTES / measure(Call(lambda: copy(source), jax_queue()), repeat=5).us / 1e3
