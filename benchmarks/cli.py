"""The command line of `python -m jax_fp8gemm bench`."""

import argparse
import functools
import json
import os
import pathlib
from collections.abc import Sequence

import jax

from benchmarks.case import Case
from benchmarks.compare import compare_files
from benchmarks.families.all_cases import LAYERS_OF_KERNELS, MESH, cases_of, exchange_rows
from benchmarks.families.host import host_times
from benchmarks.families.mesh import local_mesh, sample_steps, unusable_reason
from benchmarks.options import check, make_parser, peers_of, shapes_of, table_name
from benchmarks.report import document, results_path, write_json
from benchmarks.run import Device, Options, copy_gbps, run
from benchmarks.tiles import with_regret, with_tiles
from benchmarks.timing.rounds import Rounds
from benchmarks.timing.timer import (
    sample_chain,
    sample_flushed,
    sample_nothing,
    sample_sustained,
)
from jax_fp8gemm._runtime import extension

_MESH_ROUNDS = 10
_DRY_GBPS = 4000.0  # any


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one family. Returns the exit status: 1 where our kernels cannot run, or a row failed."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        shapes = shapes_of(arguments)
        check(arguments)
        old = json.loads(pathlib.Path(arguments.compare).read_text()) if arguments.compare else None
    except (ValueError, OSError) as error:
        parser.error(str(error))
    is_mesh = arguments.family in MESH
    if is_mesh:
        # JAX takes its memory at once. The bf16 layer of expert-parallel needs 110 GB of it.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
        # Without it a run on two H200s stopped inside its first row, where a GPU waited for NCCL.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    else:
        # torch's peers share the card: JAX must not take three quarters of its memory first.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    reason = None if arguments.dry_run else extension.unavailable_reason()
    if reason is not None:
        print(f"bench: times our CUDA kernels, which do not run here: {reason}. Nothing measured.")
        return 1
    if is_mesh and (reason := unusable_reason(arguments.family)) is not None:
        print(f"bench: {reason}. Nothing measured.")
        return 1
    name = jax.devices()[0].device_kind
    files = [pathlib.Path(arguments.json)] if arguments.json else []
    if arguments.save is not None:
        num_gpus = local_mesh().size if is_mesh else 1
        files.append(results_path(arguments.save, name, table_name(arguments, num_gpus)))
    if arguments.family == "host":
        _run_host(name, files)
        return 0
    bandwidth = _DRY_GBPS if arguments.dry_run else copy_gbps()
    device = Device(name, extension.num_sms(), bandwidth)
    options = Options(
        rounds=_rounds(arguments),
        peers=peers_of(arguments),
        files=files,
        is_together=not is_mesh,
        notes={"flush": _flush(arguments)} | ({"dry_run": True} if arguments.dry_run else {}),
    )
    outcome = run(arguments.family.replace("-", "_"), _cases(arguments, shapes), options, device)
    if old is not None:
        new = document(name, {}, outcome.rows)
        print(*compare_files(old, new), sep="\n")
    return 1 if outcome.failed else 0


def _cases(arguments: argparse.Namespace, shapes: Sequence) -> Sequence[Case]:
    if arguments.exchange:
        return exchange_rows(arguments.exchange, arguments.parts)
    cases = cases_of(arguments.family, shapes, arguments.parts)
    if arguments.tile:
        return list(with_tiles(cases, arguments.tile))
    return with_regret(cases) if arguments.regret else cases


def _rounds(arguments: argparse.Namespace) -> Rounds:
    how = dict(seed=arguments.seed, num_calls=arguments.calls)
    if arguments.dry_run:
        return Rounds(1, 1, arguments.seed, sample_nothing)
    if arguments.family in MESH:
        num_rounds = min(_MESH_ROUNDS, arguments.rounds * arguments.calls)
        return Rounds(num_rounds, 1, arguments.seed, sample_steps)
    if arguments.sustained:
        return Rounds(min(3, arguments.rounds), **how, sampler=sample_sustained)
    if arguments.family in LAYERS_OF_KERNELS:
        return Rounds(arguments.rounds, **how, sampler=sample_chain)
    sampler = functools.partial(sample_flushed, flush=arguments.flush)
    return Rounds(arguments.rounds, **how, sampler=sampler)


def _flush(arguments: argparse.Namespace) -> str | None:
    is_flushed = arguments.family not in (*MESH, *LAYERS_OF_KERNELS) and not arguments.sustained
    return arguments.flush if is_flushed else None


def _run_host(device: str, files: Sequence[pathlib.Path]) -> None:
    times = host_times()
    base = times["x + 1"]
    for name, us in times.items():
        print(f"{name:<20}{us:8.2f} us{us - base:+8.2f} against x + 1")
    content = document(device, {}, []) | {
        "rows": [{"family": "host", "call": name, "us": round(us, 3)} for name, us in times.items()]
    }
    for file in files:
        write_json(file, content)
