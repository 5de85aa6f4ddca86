"""A clock for the benchmark's tests, where nothing is timed."""

from benchmarks import run
from benchmarks.timing.rounds import Rounds
from benchmarks.timing.timer import Call, Sampler, Samples

DEVICE = run.Device("NVIDIA H200", 132, 4270.0)


def fake_sampler(ours: float, peers: float | None = None) -> Sampler:
    """Runs the call once and says `ours`, or `peers` of a call of which every kernel counts."""

    def sample(call: Call, num_calls: int) -> Samples:
        call.queue.launch(call.run)
        call.queue.wait()
        us = ours if call.kernel or peers is None else peers
        return Samples([us] * num_calls, [0.5] * num_calls)

    return sample


def fake_rounds(ours: float, peers: float | None = None) -> Rounds:
    """One round of one call by that clock."""
    return Rounds(1, 1, sampler=fake_sampler(ours, peers))
