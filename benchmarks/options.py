"""The options of `python -m jax_fp8gemm bench FAMILY`, and what they must be."""

import argparse
import pathlib
from collections.abc import Sequence

from benchmarks import peers
from benchmarks.families.all_cases import FAMILIES, LAYERS_OF_KERNELS, MESH, TILED
from benchmarks.families.exchanges import parse_mode
from benchmarks.families.expert_parallel import PARTS
from benchmarks.problem import Shape, parse_shape
from benchmarks.provenance import ROOT, source_commit
from benchmarks.shapes import ROW_SETS, row_shapes
from benchmarks.tiles import parse_tile
from benchmarks.timing.queues import FLUSHES

RESULTS = "benchmarks/results"


def make_parser() -> argparse.ArgumentParser:
    commands = "suite, spread, warm-deepgemm, tile-times, stamp, page, plot"
    others = f"other commands, in place of FAMILY: {commands}"
    parser = argparse.ArgumentParser(
        prog="python -m jax_fp8gemm bench", description=__doc__, epilog=others
    )
    add = parser.add_argument
    add("family", choices=FAMILIES)
    shape = "MxNxK; quantize, activation: MxK; ragged, masked: GxExNxK; ragged-wgrad*: GxMxNxE"
    add("--shape", action="extend", nargs="+", default=[], help=shape)
    rows = "which rows: all; with m (or E) <= 512 or >= 1024; other sets: docs/benchmarks.md"
    add("--rows", choices=ROW_SETS, default="all", help=rows)
    add("--random", type=int, default=100, metavar="N", help="how many rows --rows random draws")
    tile = "tile config to force, as the table prints it, or 'all'; may be repeated"
    add("--tile", action="append", default=[], help=tile)
    exchange = "of expert-parallel, also alone: all, NAME, ragged_all_to_all/UPDATES, OUTER+INNER"
    add("--exchange", action="extend", nargs="+", default=[], help=exchange)
    add("--regret", action="store_true", help="time every tile config beside the chosen one")
    parts = "of expert-parallel: into how many parts a GPU divides its tokens; may be several"
    add("--parts", nargs="+", choices=PARTS, default=["1"], help=parts)
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


def table_name(arguments: argparse.Namespace, num_gpus: int) -> str:
    """The name of the results file.

    num_gpus: of a family that runs on all of them.
    """
    parts = [arguments.family.replace("-", "_")]
    if arguments.rows in ("held-out", "random", "curve", "short", "narrow"):
        parts.append(arguments.rows.replace("-", "_"))
    parts += ["regret"] if arguments.regret else []
    parts += ["exchanges"] if arguments.exchange else []
    parts += ["sustained"] if arguments.sustained else []
    parts += ["read_flush"] if arguments.flush == "read" else []
    parts += [f"x{num_gpus}"] if arguments.family in MESH else []
    return "_".join(parts)


def shapes_of(arguments: argparse.Namespace) -> Sequence[Shape]:
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


def peers_of(arguments: argparse.Namespace) -> Sequence[str] | None:
    """The names to time; None for all that a case has."""
    if arguments.no_peers:
        return ()
    return arguments.peers.split(",") if arguments.peers else None


def check(arguments: argparse.Namespace) -> None:
    if unknown := sorted(set(peers_of(arguments) or ()) - set(peers.NAMES)):
        raise ValueError(f"bench: --peers must be of {', '.join(peers.NAMES)}; got {unknown[0]}")
    if (arguments.tile or arguments.regret) and arguments.family not in TILED:
        raise ValueError(f"bench: --tile is for {', '.join(TILED)}; got {arguments.family}")
    if arguments.parts != ["1"] and arguments.family != "expert-parallel":
        raise ValueError(f"bench: --parts is for expert-parallel; got {arguments.family}")
    if arguments.exchange and arguments.family != "expert-parallel":
        raise ValueError(f"bench: --exchange is for expert-parallel; got {arguments.family}")
    for text in arguments.exchange:
        if text != "all":
            parse_mode(text)
    for text in arguments.tile:
        if text != "all":
            parse_tile(text)
    kept = arguments.save is not None and pathlib.Path(arguments.save).resolve() == ROOT / RESULTS
    if kept and not arguments.allow_dirty and (found := source_commit())["dirty"] is not False:
        raise ValueError(
            f"bench: --save needs the sources of one commit, without changes; got {found}. "
            "--allow-dirty saves all the same"
        )
