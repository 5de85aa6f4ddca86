"""What the families share that run on all local GPUs: mesh, clock, and the bytes that are moved."""

import collections
import functools
import math
import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, Mesh

from benchmarks.case import peak_bytes
from benchmarks.families.hlo_text import CALLED, COLLECTIVES, computations, products_beside
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call, Samples

AXIS = "devices"
# Queued back to back in one sample of the clock. The host takes a while to begin the first step,
# which none of a longer row waits for: about 1 ms in all, with four GPUs.
_LEAST_STEPS, _LEAST_SECONDS = 3, 0.2
Options: TypeAlias = Mapping[str, str | bool]


def collectives_at_once(number: int) -> Options:
    """XLA's option by which up to `number` collectives run at once."""
    return {"xla_gpu_experimental_parallel_collective_overlap_limit": str(number)}


# Collectives beside products.
_OPTIONS: Options = {"xla_gpu_enable_latency_hiding_scheduler": True, **collectives_at_once(2)}

_COLLECTIVE = re.compile(rf" = (.+?) ({COLLECTIVES})(?:-done)?\(")
_WHILE = re.compile(r" while\(.* body=%?([\w.-]+)")
_TURN = ", a turn"
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def unusable_reason(family: str) -> str | None:
    """Why a family cannot run here; None if it can."""
    if (num := jax.local_device_count()) < 2:
        return f"{family} needs at least two GPUs; got {num}"
    return None


@functools.cache
def local_mesh() -> Mesh:
    """All local devices, or the largest power of two of them, on one Auto axis."""
    devices = jax.local_devices()
    num_devices = 1 << (len(devices).bit_length() - 1)
    return jax.make_mesh(
        (num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:num_devices]
    )


def step_call(
    step: Callable[..., Any],
    state: Any,
    *operands: Any,
    max_repeat: int | None = None,
    options: Options = MappingProxyType({}),
) -> Call:
    """The compiled step(state, *operands) -> (state, value), each on the state of the one before.

    Its collectives may run beside other kernels, if XLA finds some.

    options: of XLA's compiler, beside those of all steps.
    """
    jitted = jax.jit(step, donate_argnums=0)
    compiled = jitted.lower(state, *operands).compile(compiler_options={**_OPTIONS, **options})
    text = compiled.as_text() or ""
    states = [state]

    def run() -> Any:
        states[0], value = compiled(states[0], *operands)
        return value

    return Call(
        run,
        jax_queue(),
        max_repeat=max_repeat,
        peak_bytes=peak_bytes(compiled),
        moved_bytes=moved_bytes(text, local_mesh().size) or None,
        products_beside=products_beside(text) or None,
    )


def sample_steps(call: Call, num_calls: int) -> Samples:
    """The host's clock over steps in a row, until all devices are done.

    There are at least three steps, and as many more as 0.2 s need.

    Kernels of several devices wait for each other: their times do not add up to that of a step.
    """
    del num_calls
    seconds = _seconds_of_steps(call, _LEAST_STEPS)
    if seconds * _LEAST_STEPS < _LEAST_SECONDS:
        seconds = _seconds_of_steps(call, math.ceil(_LEAST_SECONDS / seconds))
    return Samples([seconds * 1e6], timer="wall")


def _seconds_of_steps(call: Call, num_steps: int) -> float:
    """The seconds of one of so many steps in a row."""
    start = time.perf_counter()
    for _ in range(num_steps):
        call.queue.launch(call.run)
    call.queue.wait()
    return (time.perf_counter() - start) / num_steps


def moved_bytes(text: str, num_devices: int) -> dict[str, int]:
    """Bytes of the arrays that collectives move in one run of a compiled program, by kind.

    Args:
      text: of the optimised HLO.
      num_devices: that take part in each collective.
    Returns:
      {"all-gather f8e4m3fn": bytes, ...}: of an array gathered, and of one summed or scattered,
      the whole of it; of a ragged exchange the array with room for all that may come. A loop's as
      often as it runs. One that runs as often as the data say is not in these sums: what one turn
      of it moves has a kind of its own, "all-gather f8e4m3fn, a turn".
    """
    of = computations(text)

    def count(name: str) -> Mapping[str, int]:
        total: collections.Counter[str] = collections.Counter()
        for line in of.get(name, ()):
            if found := _COLLECTIVE.search(line):
                total.update(_result_bytes(found[1], found[2], num_devices))
            elif found := _WHILE.search(line):
                total.update(_loop_bytes(count(found[1]), _TRIP_COUNT.search(line)))
            else:
                for called in CALLED.findall(line):
                    total.update(count(called))
        return total

    return dict(sorted(count("ENTRY").items()))


def _loop_bytes(body: Mapping[str, int], times: re.Match[str] | None) -> Mapping[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for kind, num_bytes in body.items():
        if times is None:
            total[kind.removesuffix(_TURN) + _TURN] += num_bytes
        else:
            total[kind] += int(times[1]) * num_bytes
    return total


def _result_bytes(types: str, kind: str, num_devices: int) -> dict[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
        num_bytes = int(digits[0]) // 8 if (digits := re.findall(r"\d+", dtype)) else 1
        for extent in filter(None, shape.split(",")):
            num_bytes *= int(extent)
        total[f"{kind} {dtype}"] += num_bytes * (num_devices if kind == "reduce-scatter" else 1)
    return total
