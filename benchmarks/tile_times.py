"""`python -m benchmarks tile-times`: many tile configs on many shapes, for the cost models.

They are of dense products, or with `--family ragged` of groups of rows. A row has the time of each
config on one shape, in microseconds: the median over rounds, each in an order of its own, of one
call with a flush of the L2 before it. All kernels are compiled first. The programs of the next
shapes are compiled by threads while one shape is timed.
"""

import argparse
import concurrent.futures
import datetime
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.case import GEMM_KERNEL, tile_text
from benchmarks.grouped_tile_programs import KERNEL as GROUPED_KERNEL
from benchmarks.grouped_tile_programs import (
    grouped_operands_of,
    grouped_programs_of,
    groups_labels,
)
from benchmarks.peers.dense import peer_calls
from benchmarks.problem import GroupedShape, Shape
from benchmarks.provenance import source_commit, versions
from benchmarks.report import write_json
from benchmarks.shapes import draw_groups_of_classes, draw_shapes_of_classes, row_shapes
from benchmarks.tile_candidates import all_candidates, all_grouped_candidates
from benchmarks.tile_programs import (
    KERNEL,
    compile_kernels,
    draw_values,
    operands_of,
    programs_of,
)
from benchmarks.timing.cupti import cupti, stop_recording
from benchmarks.timing.queues import JaxQueue
from benchmarks.timing.timer import Call, sample_flushed, warm_up
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning.tile import TileConfig
from jax_fp8gemm._tuning.tile_config import GROUPED_ROWS, configs

_FLUSH_BYTES = 1 << 28  # several times the L2
_MOST_COMPARED = 1 << 21  # elements of a result
_AHEAD = 3  # shapes whose programs are compiled while one is timed
Programs = dict[TileConfig, Callable[..., jax.Array]]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tile-times", description=__doc__)
    add = parser.add_argument
    add("--out", required=True, metavar="FILE", help="JSON file to write")
    add("--family", choices=("dense", "ragged"), default="dense")
    add("--random", type=int, default=80, metavar="N", help="how many shapes to draw")
    add("--seed", type=int, default=1, help="of the shapes and of the orders")
    add(
        "--suite-random",
        type=int,
        default=0,
        metavar="N",
        help="rows of `bench FAMILY --rows random`",
    )
    add("--peers", help="comma-separated names of peers of `dense` to time in the same rounds")
    add("--rows", nargs="*", default=(), metavar="SET", help="also these rows of `bench`, last")
    add("--seconds", type=float, default=60, help="how long the shapes may take")
    add("--rounds", type=int, default=4)
    add(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes and threads that compile",
    )
    add("--compile-only", action="store_true", help="compile the kernels and end; needs no GPU")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    start = time.perf_counter()
    is_grouped = arguments.family == "ragged"
    of_all = (all_grouped_candidates, GROUPED_KERNEL) if is_grouped else (all_candidates, KERNEL)
    failed = compile_kernels(of_all[0](), of_all[1], arguments.jobs)
    print(f"tile-times: kernels in {time.perf_counter() - start:.0f} s", *failed, sep="\n")
    if arguments.compile_only:
        return 1 if failed else 0
    reason = extension.unavailable_reason()
    if reason is not None:
        print(f"tile-times: must run where our kernels do; got: {reason}")
        return 1
    draw = draw_groups_of_classes if is_grouped else draw_shapes_of_classes
    shapes: list[Shape] = [*draw(arguments.random, arguments.seed)]
    shapes += row_shapes(arguments.family, "random", num_random=arguments.suite_random)
    for rows_of in arguments.rows:
        shapes += row_shapes(arguments.family, rows_of)
    rows: list[dict[str, Any]] = []
    head = _head(arguments)
    try:
        for row in time_shapes(shapes, arguments):
            rows.append(row)
            write_json(pathlib.Path(arguments.out), head | {"rows": rows})
    finally:
        stop_recording()
    print(f"tile-times: {len(rows)} shapes in {time.perf_counter() - start:.0f} s")
    return 0


def time_shapes(shapes: Sequence[Shape], how: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the row of each shape while there is time."""
    end = time.perf_counter() + how.seconds
    pools, order = draw_values(), random.Random(how.seed)
    queue = JaxQueue(_FLUSH_BYTES)
    with concurrent.futures.ThreadPoolExecutor(how.jobs) as threads:
        ahead = [_programs_of(shape, threads) for shape in shapes[:_AHEAD]]
        for i, shape in enumerate(shapes):
            if time.perf_counter() > end:
                return
            if i + _AHEAD < len(shapes):
                ahead.append(_programs_of(shapes[i + _AHEAD], threads))
            programs = {c: future.result() for c, future in ahead[i].items()}
            ahead[i] = {}
            operands = _operands_of(shape, pools)
            peers = _peers(shape, how.peers.split(",") if how.peers else ())
            us, peers_us = time_programs(programs, operands, peers, queue, how.rounds, order)
            row = {**_labels(shape), "us": us}
            row |= {"peers": peers_us} if peers_us else {}
            if operands[0].shape[0] * (shape.n or 0) <= _MOST_COMPARED:
                wrong = [tile_text(c) for c in differing(programs, operands)]
                row |= {"wrong": wrong} if wrong else {}
            yield row


def _programs_of(shape: Shape, threads: concurrent.futures.Executor) -> dict[TileConfig, Any]:
    if isinstance(shape, GroupedShape):
        return grouped_programs_of(shape, threads)
    return programs_of(shape, threads)


def _operands_of(shape: Shape, pools: tuple[np.ndarray, np.ndarray]) -> list[jax.Array]:
    if isinstance(shape, GroupedShape):
        return grouped_operands_of(shape, pools)
    return operands_of(shape, pools)


def _labels(shape: Shape) -> dict[str, Any]:
    if isinstance(shape, GroupedShape):
        return groups_labels(shape)
    return {"m": shape.m, "n": shape.n, "k": shape.k}


def _peers(shape: Shape, names: Sequence[str]) -> dict[str, Call]:
    """The peers' calls; without those that refuse the shape."""
    calls: dict[str, Call] = {}
    for name in names:
        try:
            call = peer_calls(shape, is_1d1d=False)[name]()
            warm_up(call)
        except Exception as error:  # other people's code
            print(f"tile-times: {shape}: {name}: {error}")
        else:
            calls[name] = call
    return calls


def time_programs(
    programs: Programs,
    operands: Sequence[jax.Array],
    peers: Mapping[str, Call],
    queue: JaxQueue,
    num_rounds: int,
    order: random.Random,
) -> tuple[dict[str, float], dict[str, float]]:
    """The median time of each program and peer, in microseconds. The first round warms up."""
    of_peers: dict[str, list[float]] = {name: [] for name in peers}
    samples: dict[TileConfig, list[float]] = {config: [] for config in programs}
    for i in range(num_rounds + 1):
        configs = list(programs)
        order.shuffle(configs)
        with cupti().record() as activities:
            for config in configs:
                queue.flush("write")
                queue.launch(lambda config=config: programs[config](*operands))
            queue.wait()
        times = [activity.us for activity in activities if GEMM_KERNEL in activity.name]
        if i:
            for config, us in zip(configs, times, strict=True):
                samples[config].append(us)
        for name, call in peers.items():
            us = sample_flushed(call, 1).us
            of_peers[name] += us if i else []
    median = lambda us: round(statistics.median(us), 2)
    us = {tile_text(config): median(of_config) for config, of_config in samples.items()}
    return us, {name: median(of_peer) for name, of_peer in of_peers.items()}


def differing(programs: Programs, operands: Sequence[jax.Array]) -> list[TileConfig]:
    """The configs whose bits are not those of the first config that a call can choose."""
    bits = {c: np.asarray(run(*operands)).view(np.uint16) for c, run in programs.items()}
    listed = {*configs(is_1d1d=False), *configs(GROUPED_ROWS, is_1d1d=False)}
    expected = next(bits[c] for c in bits if c in listed)
    return [c for c, found in bits.items() if not np.array_equal(found, expected)]


def _head(how: argparse.Namespace) -> dict[str, Any]:
    """What the file says of the whole run."""
    return {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        **source_commit(),
        "versions": versions(),
        "rounds": how.rounds,
        "seed": how.seed,
    }
