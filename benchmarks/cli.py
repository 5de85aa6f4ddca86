"""The command line of `python -m jax_fp8gemm bench`."""

import argparse
import functools
import json
import os
import pathlib
from collections.abc import Sequence

import jax

from benchmarks import peers
from benchmarks.case import Case
from benchmarks.compare import compare_files
from benchmarks.families.all_cases import LAYERS_OF_KERNELS, MESH, TILED, cases_of
from benchmarks.families.host import host_times
from benchmarks.families.mesh import sample_steps, unusable_reason
from benchmarks.problem import parse_shape
from benchmarks.provenance import ROOT, source_commit
from benchmarks.report import document, results_path, write_json
from benchmarks.run import Device, Options, copy_gbps, run
from benchmarks.shapes import ROW_SETS, row_shapes
from benchmarks.tiles import parse_tile, with_regret, with_tiles
from benchmarks.timing.queues import FLUSHES
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
RESULTS = "benchmarks/results"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one family. Returns the exit status: 1 where our kernels cannot run, or a row failed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        shapes = _shapes(arguments)
        _check(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    is_mesh = arguments.family in MESH
    if is_mesh:
        # In one piece, of which the bf16 layer of expert-parallel needs 110 GB.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
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
        files.append(results_path(arguments.save, name, _table(arguments)))
    if arguments.family == "host":
        _run_host(name, files)
        return 0
    bandwidth = _DRY_GBPS if arguments.dry_run else copy_gbps()
    device = Device(name, extension.num_sms(), bandwidth)
    options = Options(
        rounds=_rounds(arguments),
        peers=_peers(arguments),
        files=files,
        is_together=not is_mesh,
        notes={"flush": _flush(arguments)} | ({"dry_run": True} if arguments.dry_run else {}),
    )
    outcome = run(arguments.family.replace("-", "_"), _cases(arguments, shapes), options, device)
    if arguments.compare:
        old = json.loads(pathlib.Path(arguments.compare).read_text())
        new = document(name, {}, outcome.rows)
        print(*compare_files(old, new), sep="\n")
    return 1 if outcome.failed else 0


def _parser() -> argparse.ArgumentParser:
    from benchmarks.families.all_cases import FAMILIES

    parser = argparse.ArgumentParser(prog="python -m jax_fp8gemm bench", description=__doc__)
    add = parser.add_argument
    add("family", choices=FAMILIES)
    shape = "MxNxK; quantize: MxK; ragged, masked: GxExNxK; ragged-wgrad: GxMxNxE"
    add("--shape", action="extend", nargs="+", default=[], help=shape)
    rows = "which rows: all; with m (or E) <= 512 or >= 1024; other sets: docs/benchmarks.md"
    add("--rows", choices=ROW_SETS, default="all", help=rows)
    add("--random", type=int, default=100, metavar="N", help="how many rows --rows random draws")
    tile = "tile config to force, as the table prints it, or 'all'; may be repeated"
    add("--tile", action="append", default=[], help=tile)
    add("--regret", action="store_true", help="time every tile config beside the chosen one")
    add("--rounds", type=int, default=5, help="rounds, each in an order of its own")
    add("--calls", type=int, default=4, help="calls of each implementation in a round")
    add("--seed", type=int, default=0, help="of the orders")
    add("--flush", choices=FLUSHES, default="write", help="how the L2 is flushed before a call")
    add("--sustained", action="store_true", help="queue calls back to back, for seconds")
    add("--peers", help=f"comma-separated, of {', '.join(peers.NAMES)}; default: all")
    add("--no-peers", action="store_true", help="time our kernels alone")
    add("--compare", metavar="OLD.json", help="say what is slower than in an older file")
    add("--json", metavar="FILE", help="write the rows to a file")
    add("--save", metavar="FOLDER", nargs="?", const=RESULTS, help=f"keep them, in {RESULTS}")
    dry = "run each call once on any device, and time nothing"
    add("--dry-run", action="store_true", help=dry)
    add("--allow-dirty", action="store_true", help="--save there with changes on top of a commit")
    return parser


def _cases(arguments: argparse.Namespace, shapes: Sequence) -> Sequence[Case]:
    cases = cases_of(arguments.family, shapes)
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


def _table(arguments: argparse.Namespace) -> str:
    """The name of the results file."""
    parts = [arguments.family.replace("-", "_")]
    if arguments.rows in ("held-out", "random", "curve", "short"):
        parts.append(arguments.rows.replace("-", "_"))
    parts += ["regret"] if arguments.regret else []
    parts += ["sustained"] if arguments.sustained else []
    parts += ["read_flush"] if arguments.flush == "read" else []
    return "_".join(parts)


def _shapes(arguments: argparse.Namespace) -> Sequence:
    """The shapes to measure, or none for a family that has its own."""
    family = arguments.family.replace("-", "_")
    if arguments.family in (*LAYERS_OF_KERNELS, *MESH, "host"):
        if arguments.shape or (arguments.sustained and arguments.family not in LAYERS_OF_KERNELS):
            raise ValueError(
                f"bench: {arguments.family} has fixed sizes; got --shape or --sustained"
            )
        return []
    if arguments.shape:
        return [parse_shape(text, family) for text in arguments.shape]
    how = dict(sustained=arguments.sustained, num_random=arguments.random)
    shapes = row_shapes(family, arguments.rows, **how)
    if not shapes:
        name, rows = arguments.family, arguments.rows
        raise ValueError(f"bench: --rows must leave {name} a row to measure; got {rows}")
    return shapes


def _peers(arguments: argparse.Namespace) -> Sequence[str] | None:
    """The names to time; None for all that a case has."""
    if arguments.no_peers:
        return ()
    return arguments.peers.split(",") if arguments.peers else None


def _check(arguments: argparse.Namespace) -> None:
    if unknown := sorted(set(_peers(arguments) or ()) - set(peers.NAMES)):
        raise ValueError(f"bench: --peers must be of {', '.join(peers.NAMES)}; got {unknown[0]}")
    if (arguments.tile or arguments.regret) and arguments.family not in TILED:
        raise ValueError(f"bench: --tile is for {', '.join(TILED)}; got {arguments.family}")
    for text in arguments.tile:
        if text != "all":
            parse_tile(text)
    kept = arguments.save is not None and pathlib.Path(arguments.save).resolve() == ROOT / RESULTS
    if kept and not arguments.allow_dirty and (found := source_commit())["dirty"] is not False:
        raise ValueError(
            f"bench: --save needs the sources of one commit, without changes; got {found}. "
            "--allow-dirty saves all the same"
        )


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
