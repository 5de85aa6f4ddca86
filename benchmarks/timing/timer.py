"""Samples of one call: device time by CUPTI, or the host's clock where CUPTI cannot be had."""

import collections
import dataclasses
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.timing.cupti import Activity, CuptiError, cupti
from benchmarks.timing.nvml import Energy, SmClock
from benchmarks.timing.queues import Flush, Queue

_NUM_WARMUP = 2
_MAX_CALLS = 20_000  # of one sustained sample: CUPTI keeps a record of each kernel


@dataclasses.dataclass(frozen=True)
class Call:
    """A call to time.

    run: queues the work and returns without waiting.
    queue: the stream it goes to.
    kernel: substring of the names of the kernels that count; "" counts all of them.
    max_repeat: the most calls to take a median of, for a slow one.
    peak_bytes: device memory that the call's program needs, where that is known.
    moved_bytes: what its collectives move, by kind and dtype.
    products_beside: how many products are queued while each collective runs, by kind.
    """

    run: Callable[[], Any]
    queue: Queue
    kernel: str = ""
    max_repeat: int | None = None
    peak_bytes: int | None = None
    moved_bytes: Mapping[str, int] | None = None
    products_beside: Mapping[str, Sequence[int]] | None = None


@dataclasses.dataclass(frozen=True)
class Samples:
    """What one round measured of one call; times are microseconds of one call each.

    us: the kernels that count.
    other_us: the call's other kernels and copies.
    span_us: from the first kernel's start to the last one's end, over the calls: with the gaps.
    joules: of one call, where it was measured.
    kernels: microseconds of each kernel in one call, by its name, where calls ran back to back.
    """

    us: Sequence[float]
    other_us: Sequence[float] = (0.0,)
    timer: str = "cupti"
    span_us: float | None = None
    sm_mhz: int | None = None
    joules: float | None = None
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)


# Measures a call a few times. The number is of calls, where the sampler does not choose it.
Sampler = Callable[[Call, int], Samples]


def warm_up(call: Call) -> None:
    for _ in range(_NUM_WARMUP):
        call.queue.launch(call.run)
    call.queue.wait()


def sample_flushed(call: Call, num_calls: int, flush: Flush = "write") -> Samples:
    """`num_calls` calls, each after a flush of the L2."""
    flush_queue = functools.partial(call.queue.flush, flush)
    try:
        num_flush = _num_flush(call.queue, flush)
        steps = [flush_queue, lambda: call.queue.launch(call.run)]
        activities = _record(steps * num_calls, call.queue)
    except CuptiError as error:
        return _host_samples(call, num_calls, error)
    return Samples(*split(activities, num_calls, num_flush, call.kernel))


def sample_chain(call: Call, num_calls: int) -> Samples:
    """`num_calls` calls back to back, without a flush; says their span and their kernels too."""
    try:
        activities = _record([lambda: call.queue.launch(call.run)] * num_calls, call.queue)
    except CuptiError as error:
        return _host_samples(call, num_calls, error)
    span = max(a.end_ns for a in activities) - min(a.start_ns for a in activities)
    counted, other = split(activities, num_calls, 0, call.kernel)
    kernels: dict[str, float] = collections.defaultdict(float)
    for activity in activities:
        kernels[activity.name] += activity.us / num_calls
    return Samples(counted, other, span_us=span / num_calls / 1e3, kernels=kernels)


def sample_sustained(call: Call, num_calls: int, seconds: float = 0.7) -> Samples:
    """The mean over calls queued back to back for `seconds`: the card at its power limit."""
    del num_calls
    once = sample_chain(call, 3)
    us = once.span_us or statistics.median(once.us)
    num = min(_MAX_CALLS, max(1, math.ceil(seconds * 1e6 / us)))
    with SmClock() as clock, Energy() as energy:
        many = sample_chain(call, num)
    return dataclasses.replace(
        many,
        us=[statistics.fmean(many.us)],
        other_us=[statistics.fmean(many.other_us)],
        sm_mhz=clock.mhz(),
        joules=energy.joules(num),
    )


def sample_nothing(call: Call, num_calls: int) -> Samples:
    """Runs the call once more, and gives it any time."""
    del num_calls
    call.queue.launch(call.run)
    call.queue.wait()
    return Samples([1.0], timer="none")


def split(
    activities: Sequence[Activity], num_calls: int, num_flush: int, kernel: str
) -> tuple[list[float], list[float]]:
    """Microseconds of each call, as (the kernels that count, the others).

    activities: of `num_calls` equal calls in a row, by start time.
    num_flush: how many activities at the head of each call belong to the flush.

    Raises: ValueError if the activities do not divide evenly among the calls, or none counts.
    """
    per_call, rest = divmod(len(activities), num_calls)
    if rest or per_call <= num_flush:
        names = sorted({activity.name for activity in activities})
        raise ValueError(
            f"bench: each of {num_calls} calls must run the same kernels after {num_flush} of the "
            f"flush; got {len(activities)} activities named {names}"
        )
    counted, other = [], []
    for first in range(0, len(activities), per_call):
        own = activities[first + num_flush : first + per_call]
        counted.append(math.fsum(activity.us for activity in own if kernel in activity.name))
        other.append(math.fsum(activity.us for activity in own if kernel not in activity.name))
    if not all(counted):
        names = sorted({activity.name for activity in activities})
        raise ValueError(f"bench: a kernel named *{kernel}* must run in each call; got {names}")
    return counted, other


_flush_counts: dict[tuple[type[Queue], Flush], int] = {}


def _num_flush(queue: Queue, flush: Flush) -> int:
    """How many activities a flush is: the second one, because the first may set something up."""
    key = type(queue), flush
    if key not in _flush_counts:
        queue.flush(flush)
        queue.wait()
        _flush_counts[key] = len(_record([functools.partial(queue.flush, flush)], queue))
    return _flush_counts[key]


def _record(steps: Sequence[Callable[[], None]], queue: Queue) -> list[Activity]:
    """What the device ran for the steps."""
    with cupti().record() as activities:
        for step in steps:
            step()
        queue.wait()
    return activities


def _host_samples(call: Call, num_calls: int, error: CuptiError) -> Samples:
    """The host's clock over calls queued back to back."""
    warnings.warn(f"{error}; the host's clock is used instead", RuntimeWarning, stacklevel=3)
    start = time.perf_counter()
    for _ in range(num_calls):
        call.queue.launch(call.run)
    call.queue.wait()
    return Samples([(time.perf_counter() - start) / num_calls * 1e6], timer="host")
