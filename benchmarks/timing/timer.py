"""Times one call: device time by CUPTI, or the host's clock where CUPTI cannot be had."""

import dataclasses
import functools
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from benchmarks.timing.cupti import Activity, CuptiError, cupti

_FLUSH_BYTES = 1 << 30  # far above any L2; the peers' reference figures were flushed with as much
_NUM_WARMUP = 3


@runtime_checkable
class Queue(Protocol):
    """One framework's stream of work on the device."""

    def flush(self) -> None:
        """Queues a write of a large buffer, so that the next call finds the L2 cold."""
        ...

    def launch(self, function: Callable[[], Any]) -> None:
        """Queues one call."""
        ...

    def wait(self) -> None:
        """Waits for all queued work."""
        ...


class JaxQueue:
    """JAX's stream on the default device."""

    def __init__(self, flush_bytes: int = _FLUSH_BYTES):
        self._fill = jax.jit(lambda value: jnp.broadcast_to(value, (flush_bytes // 4,)))
        # On the device from the start: a copy from the host would run beside the calls.
        self._value = jax.device_put(jnp.float32(1))
        self._last: Any = None

    def flush(self) -> None:
        self._last = None  # frees the last result first
        self._last = self._fill(self._value)

    def launch(self, function: Callable[[], Any]) -> None:
        self._last = function()

    def wait(self) -> None:
        jax.block_until_ready(self._last)


@functools.cache
def jax_queue() -> JaxQueue:
    """The process's JAX queue."""
    return JaxQueue()


class TorchQueue:
    """torch's current stream."""

    def __init__(self, torch: Any, flush_bytes: int = _FLUSH_BYTES):
        self._torch = torch
        self._buffer = torch.empty(flush_bytes // 4, dtype=torch.float32, device="cuda")

    def flush(self) -> None:
        self._buffer.fill_(1.0)

    def launch(self, function: Callable[[], Any]) -> None:
        function()

    def wait(self) -> None:
        self._torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class Call:
    """A call to time.

    run: queues the work and returns without waiting.
    queue: the stream it goes to.
    kernel: substring of the names of the kernels that count; "" counts all of them.
    max_repeat: the most calls to take a median of, for a slow one.
    peak_bytes: device memory that the call's program needs, where that is known.
    moved_bytes: what its collectives move, by kind and dtype.
    """

    run: Callable[[], Any]
    queue: Queue
    kernel: str = ""
    max_repeat: int | None = None
    peak_bytes: int | None = None
    moved_bytes: Mapping[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    us: the kernels that count.
    other_us: the call's other kernels and copies.
    timer: "cupti", "host", or "wall": the host's clock over all devices.
    sm_mhz: SM clock while it ran, where it was sampled.
    """

    us: float
    other_us: float = 0.0
    timer: str = "cupti"
    sm_mhz: int | None = None


def measure(call: Call, repeat: int = 20, flush: bool = True) -> Timing:
    """The median over `repeat` calls, each after a flush of the L2 unless `flush` is False."""
    repeat = min(repeat, call.max_repeat or repeat)
    _warm_up(call)
    try:
        num_flush = len(_record([call.queue.flush], call.queue)) if flush else 0
        steps = [call.queue.flush] if flush else []
        steps.append(lambda: call.queue.launch(call.run))
        activities = _record(steps * repeat, call.queue)
    except CuptiError as error:
        return _host_timing(call, repeat, error)
    counted, other = split(activities, repeat, num_flush, call.kernel)
    return Timing(statistics.median(counted), statistics.median(other))


def measure_sustained(call: Call, seconds: float = 0.4) -> Timing:
    """The mean over calls queued back to back for `seconds`: the card at its power limit."""
    once = measure(call, repeat=3, flush=False)
    num_calls = max(1, math.ceil(seconds * 1e6 / (once.us + once.other_us)))
    with _SmClock() as clock:
        try:
            activities = _record([lambda: call.queue.launch(call.run)] * num_calls, call.queue)
        except CuptiError as error:
            return _host_timing(call, num_calls, error)
    counted, other = split(activities, num_calls, 0, call.kernel)
    return Timing(statistics.fmean(counted), statistics.fmean(other), sm_mhz=clock.mhz())


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


def _record(steps: Sequence[Callable[[], None]], queue: Queue) -> list[Activity]:
    """What the device ran for the steps."""
    with cupti().record() as activities:
        for step in steps:
            step()
        queue.wait()
    return activities


def _warm_up(call: Call) -> None:
    for _ in range(_NUM_WARMUP):
        call.queue.launch(call.run)
    call.queue.wait()


def _host_timing(call: Call, num_calls: int, error: CuptiError) -> Timing:
    """The host's clock over calls queued back to back."""
    warnings.warn(f"{error}; the host's clock is used instead", RuntimeWarning, stacklevel=3)
    start = time.perf_counter()
    for _ in range(num_calls):
        call.queue.launch(call.run)
    call.queue.wait()
    return Timing((time.perf_counter() - start) / num_calls * 1e6, timer="host")


class _SmClock(threading.Thread):
    """Samples the SM clock inside a `with` block, where nvidia-ml-py is installed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples: list[int] = []
        self._done = threading.Event()

    def __enter__(self) -> "_SmClock":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        try:
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self._done.wait(0.02):
                mhz = pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)
                self._samples.append(mhz)
        except Exception:  # NVML is an extra: without it the clock is not reported
            return

    def mhz(self) -> int | None:
        """The median of the later half of the samples, or None."""
        later = self._samples[len(self._samples) // 2 :]
        return round(statistics.median(later)) if later else None
