"""`python -m benchmarks spread`: our products beside DeepGEMM's on this GPU, beside other GPUs.

GPUs of one kind differ by some percent. Where two implementations differ by as much, the mean of
one machine does not say which is faster. The file has an entry for each GPU, and a row for each
product on each GPU. docs/performance.md says how far the means of the GPUs are apart.
"""

import argparse
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.case import Case
from benchmarks.families.all_cases import cases_of
from benchmarks.options import RESULTS
from benchmarks.pages.results import ratio_of_products
from benchmarks.problem import parse_shape
from benchmarks.provenance import source_commit
from benchmarks.report import Row, document, write_json
from benchmarks.run import Device, Options, copy_gbps, run
from benchmarks.shapes import row_shapes
from benchmarks.summary import geometric_mean
from benchmarks.timing.nvml import gpu_hash
from benchmarks.timing.rounds import Rounds
from benchmarks.timing.timer import sample_nothing
from benchmarks.warm_deepgemm import PEER, has_deepgemm
from jax_fp8gemm._runtime import extension

# README has a mean of each. Those nearest to 1 come first, in case that the time ends.
FAMILIES = ("dense", "ragged", "masked", "wgrad", "ragged-wgrad")
_TINY = {"ragged": "3x40x256x384", "masked": "3x40x256x384", "ragged-wgrad": "2x128x256x128"}
_DRY_MACHINE, _DRY_GBPS = "dry run", 4000.0
# What a row keeps of a results file's row: its times, and why DeepGEMM has none.
_FIGURES = ("us", "spread", "config", "peers", "peers_spread", "peers_absent", "timer")
Content = Mapping[str, Any]


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 where our kernels cannot run, or a row has no ratio."""
    arguments = _parser().parse_args(argv)
    out = pathlib.Path(arguments.out)
    content = _read(out)
    if arguments.add:
        for file in arguments.add:
            content = merged(content, _read(pathlib.Path(file)))
        write_json(out, content)
        return 0
    is_dry = arguments.dry_run
    if not is_dry and (reason := _unusable_reason(arguments.allow_dirty)):
        print(f"spread: {reason}. Nothing measured.")
        return 1
    # DeepGEMM shares the card: JAX must not take three quarters of its memory first.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    rounds = Rounds(arguments.rounds, arguments.calls)
    entry = {}
    for entry in _entries(arguments.families, is_dry, rounds):
        write_json(out, merged(content, entry))  # so that no later family can lose this one
    has_all = all(PEER in row["peers"] for row in entry["rows"])
    return 0 if is_dry or (has_all and not entry["machines"][0]["failed_rows"]) else 1


def merged(old: Content, new: Content) -> Content:
    """The machines of both files. Of a machine in both, what `new` has of it."""
    names = {machine["machine"] for machine in new["machines"]}
    both = lambda key: [x for x in old[key] if x["machine"] not in names] + new[key]
    return {"machines": both("machines"), "rows": both("rows")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks spread", description=__doc__)
    add = parser.add_argument
    add("--out", default=f"{RESULTS}/nvidia_h200/machines.json", metavar="FILE", help="JSON file")
    from_files = "add the machines of these files, and measure nothing"
    add("--add", nargs="+", default=[], metavar="FILE", help=from_files)
    add("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    add("--rounds", type=int, default=3, help="rounds, each in an order of its own")
    add("--calls", type=int, default=4, help="calls of each implementation in a round")
    dry = "run a tiny row of each family once on any device, and time nothing"
    add("--dry-run", action="store_true", help=dry)
    add("--allow-dirty", action="store_true", help="also with changes on top of a commit")
    return parser


def _read(file: pathlib.Path) -> Content:
    return json.loads(file.read_text()) if file.is_file() else {"machines": [], "rows": []}


def _unusable_reason(allow_dirty: bool) -> str | None:
    """Why nothing can be measured here, or None."""
    found = source_commit()
    if found["dirty"] is not False and not allow_dirty:
        return (
            f"needs the sources of one commit, without changes; got {found}. "
            "--allow-dirty measures all the same"
        )
    if (reason := extension.unavailable_reason()) is not None:
        return f"times our CUDA kernels, which do not run here: {reason}"
    return None if gpu_hash() else "needs NVML to tell GPUs apart: pip install nvidia-ml-py"


def _entries(families: Sequence[str], is_dry: bool, rounds: Rounds) -> Iterator[Content]:
    """Yields what the file has of this machine: after each family, with those before it."""
    name = jax.devices()[0].device_kind
    machine = _DRY_MACHINE if is_dry else gpu_hash()
    bandwidth = _DRY_GBPS if is_dry else copy_gbps()
    device = Device(name, extension.num_sms(), bandwidth)
    rounds = Rounds(1, 1, sampler=sample_nothing) if is_dry else rounds
    how = dict(rounds=rounds.num_rounds, calls=rounds.num_calls, copy_gbps=round(bandwidth))
    rows: list[dict[str, Any]] = []
    failed: list[Any] = []
    for family in families:
        options = Options(rounds, peers=(PEER, "unused_undefined"))
        outcome = run(family.replace("-", "_"), _cases(family, is_dry), options, device)
        rows += [{"machine": machine} | _short(row) for row in outcome.rows]
        failed += outcome.failed
        head = document(name, how, [], failed) | {"machine": machine, "means": _means(rows)}
        del head["rows"]
        yield {"machines": [head], "rows": rows}


def _cases(family: str, is_dry: bool) -> list[Case]:
    name = family.replace("-", "_")
    tiny = _TINY.get(family, "128x256x384")
    shapes = [parse_shape(tiny, name)] if is_dry else row_shapes(name)
    return [case for case in cases_of(family, shapes) if has_deepgemm(case)]


def _short(row: Row) -> dict[str, Any]:
    figures = {key: value for key, value in row.to_json().items() if key in _FIGURES}
    return {"family": row.family, **row.labels, **figures}


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each family the geometric mean of DeepGEMM's time over ours."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if ratio := ratio_of_products(row, PEER):
            ratios.setdefault(row["family"], []).append(ratio)
    return {family: round(geometric_mean(of) or 0.0, 4) for family, of in ratios.items()}
