"""The command line of `python -m jax_fp8gemm bench`."""

import argparse
import functools
import os
import pathlib
from collections.abc import Sequence

import jax

from benchmarks.case import Case
from benchmarks.families.expert_parallel import DEEPSEEK_V3, expert_parallel_cases
from benchmarks.families.fsdp import STACKS, fsdp_case
from benchmarks.families.grouped import grouped_cases
from benchmarks.families.host import host_times
from benchmarks.families.mesh import measure_steps, unusable_reason
from benchmarks.families.mlp import LLAMA3_8B, mlp_case
from benchmarks.families.moe import LAYERS, moe_case
from benchmarks.families.products import cases
from benchmarks.problem import GroupedShape, Shape, default_shapes, parse_shape
from benchmarks.reference import load_reference
from benchmarks.report import document, results_path, write_json
from benchmarks.run import Device, Options, copy_gbps, run
from benchmarks.tiles import parse_tile, with_tiles
from benchmarks.timing.timer import measure, measure_sustained
from jax_fp8gemm._runtime import extension

_PEERS = (
    *("cublaslt_tensorwise", "cublaslt_block", "torch_bf16"),
    *("xla_bf16", "xla", "lax_ragged_dot", "tokamax", "deepgemm"),
    "one_gpu",
)
_GROUPED = ("ragged", "masked", "ragged-wgrad")
_TILED = ("dense", "wgrad", *_GROUPED)
_LAYERS = ("matmul", "moe")  # many kernels a call, all of which count
_MESH = ("fsdp", "expert-parallel")  # on all GPUs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one family. Returns the exit status: 1 where our kernels cannot run."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        shapes = _shapes(arguments)
        peers = _peers(arguments)
        _check_tiles(arguments)
        reference = load_reference(arguments.compare)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.family in _MESH:
        # In one piece, of which the bf16 layer of expert-parallel needs 110 GB.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    else:
        # torch's peers share the card: JAX must not take three quarters of its memory first.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if (reason := extension.unavailable_reason()) is not None:
        print(f"bench: times our CUDA kernels, which do not run here: {reason}. Nothing measured.")
        return 1
    if arguments.family in _MESH and (reason := unusable_reason(arguments.family)) is not None:
        print(f"bench: {reason}. Nothing measured.")
        return 1
    name = jax.devices()[0].device_kind
    family = arguments.family.replace("-", "_")
    table = family + ("_sustained" if arguments.sustained else "")
    files = [pathlib.Path(arguments.json)] if arguments.json else []
    if arguments.save is not None:
        files.append(results_path(arguments.save, name, table))
    if arguments.family == "host":
        _run_host(name, files)
        return 0
    device = Device(name, extension.num_sms(), copy_gbps())
    if arguments.family in _MESH:
        time = functools.partial(measure_steps, repeat=arguments.repeat)
    elif family in _LAYERS:
        time = functools.partial(measure, repeat=arguments.repeat, flush=False)
    elif arguments.sustained:
        time = measure_sustained
    else:
        time = functools.partial(measure, repeat=arguments.repeat)
    rows = _cases(arguments, shapes)
    run(family, rows, Options(table, time, peers, files, reference), device)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_fp8gemm bench", description=__doc__)
    add = parser.add_argument
    add("family", choices=(*_TILED, "quantize", *_LAYERS, *_MESH, "host"))
    shape = "MxNxK; quantize: MxK; ragged, masked: GxExNxK; ragged-wgrad: GxMxNxE"
    add("--shape", action="extend", nargs="+", default=[], help=shape)
    add(
        "--rows",
        choices=("small", "large", "all"),
        default="all",
        help="default rows with m <= 512, m >= 1024, or all; ragged, masked: by E",
    )
    tile = "tile config to force, as the table prints it, or 'all'; may be repeated"
    add("--tile", action="append", default=[], help=tile)
    add("--repeat", type=int, default=20, help="calls to take the median of")
    add("--sustained", action="store_true", help="queue back to back for 0.4 s and take the mean")
    add("--peers", help=f"comma-separated, of {', '.join(_PEERS)}; default: all")
    add("--no-peers", action="store_true", help="time our kernels alone")
    add("--compare", metavar="FILE", help="reference figures; default: benchmarks/h200_peers.json")
    add("--json", metavar="FILE", help="write the rows to a file")
    folder = "benchmarks/results"
    add("--save", metavar="FOLDER", nargs="?", const=folder, help=f"keep them, in {folder}")
    return parser


def _cases(arguments: argparse.Namespace, shapes: Sequence[Shape]) -> Sequence[Case]:
    if arguments.family == "matmul":
        return [mlp_case(LLAMA3_8B)]
    if arguments.family == "moe":
        return [moe_case(layer) for layer in LAYERS]
    if arguments.family == "fsdp":
        return [fsdp_case(stack) for stack in STACKS]
    if arguments.family == "expert-parallel":
        return expert_parallel_cases(DEEPSEEK_V3)
    family = arguments.family.replace("-", "_")
    if arguments.family in _GROUPED:
        grouped = [shape for shape in shapes if isinstance(shape, GroupedShape)]
        rows = grouped_cases(family, grouped)
    else:
        rows = cases(family, shapes)
    return list(with_tiles(rows, arguments.tile)) if arguments.tile else rows


def _shapes(arguments: argparse.Namespace) -> Sequence[Shape]:
    """The shapes to measure, or none for a family that has its own."""
    family = arguments.family.replace("-", "_")
    if arguments.family in (*_LAYERS, *_MESH, "host"):
        if arguments.shape or arguments.sustained:
            raise ValueError(
                f"bench: {arguments.family} has fixed sizes; got --shape or --sustained"
            )
        return []
    if arguments.shape:
        return [parse_shape(text, family) for text in arguments.shape]
    shapes = default_shapes(family, arguments.rows, arguments.sustained)
    if not shapes:
        name, rows = arguments.family, arguments.rows
        raise ValueError(f"bench: --rows must leave {name} a row to measure; got {rows}")
    return shapes


def _peers(arguments: argparse.Namespace) -> Sequence[str]:
    if arguments.no_peers:
        return ()
    if arguments.peers is None:
        return _PEERS
    peers = arguments.peers.split(",")
    if unknown := sorted(set(peers) - set(_PEERS)):
        raise ValueError(f"bench: --peers must be of {', '.join(_PEERS)}; got {unknown[0]}")
    return peers


def _check_tiles(arguments: argparse.Namespace) -> None:
    if arguments.tile and arguments.family not in _TILED:
        raise ValueError(f"bench: --tile is for {', '.join(_TILED)}; got {arguments.family}")
    for text in arguments.tile:
        if text != "all":
            parse_tile(text)


def _run_host(device: str, files: Sequence[pathlib.Path]) -> None:
    times = host_times()
    base = times["x + 1"]
    for name, us in times.items():
        print(f"{name:<20}{us:8.2f} us{us - base:+8.2f} against x + 1")
    content = document(device, None, []) | {
        "rows": [{"family": "host", "call": name, "us": round(us, 3)} for name, us in times.items()]
    }
    for file in files:
        write_json(file, content)
