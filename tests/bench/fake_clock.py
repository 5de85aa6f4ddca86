"""A clock for the benchmark's tests, where nothing is timed."""

from collections.abc import Callable

from benchmarks import run
from benchmarks.timing import timer

DEVICE = run.Device("NVIDIA H200", 132, 4270.0)


def fake_time(us: float) -> Callable[[timer.Call], timer.Timing]:
    """A clock that runs the call once and says `us`."""

    def time(call):
        call.queue.launch(call.run)
        call.queue.wait()
        return timer.Timing(us, 0.5)

    return time
