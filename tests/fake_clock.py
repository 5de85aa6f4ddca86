"""A clock for the benchmark's tests, where nothing is timed."""

from collections.abc import Callable

from jax_fp8gemm.bench import _run, _timer

DEVICE = _run.Device("NVIDIA H200", 132, 4270.0)


def fake_time(us: float) -> Callable[[_timer.Call], _timer.Timing]:
    """A clock that runs the call once and says `us`."""

    def time(call):
        call.queue.launch(call.run)
        call.queue.wait()
        return _timer.Timing(us, 0.5)

    return time
