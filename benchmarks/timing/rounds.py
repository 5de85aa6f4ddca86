"""Times several calls side by side: in rounds, in an order that is drawn anew for each round."""

import dataclasses
import functools
import math
import random
import statistics
from collections.abc import Mapping

from benchmarks.timing.cupti import stop_recording
from benchmarks.timing.timer import Call, Sampler, Samples, sample_flushed, warm_up


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often to measure a call.

    num_rounds: each measures every call, in an order of its own.
    num_calls: of each call in a round.
    seed: of the orders, and of the row's position in its table.
    """

    num_rounds: int = 5
    num_calls: int = 4
    seed: int = 0
    sampler: Sampler = sample_flushed


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    us: the kernels that count: the median of all samples.
    spread: the least and the greatest median of a round.
    other_us: the call's other kernels and copies.
    timer: "cupti", "host", or "wall": the host's clock over all devices.
    span_us: of a chain of calls, with the gaps between kernels.
    sm_mhz, joules: SM clock while it ran and the energy of one call, where they were measured.
    kernels: of each kernel in a call of a chain, by name: the median of the rounds.
    """

    us: float
    spread: tuple[float, float]
    other_us: float = 0.0
    timer: str = "cupti"
    span_us: float | None = None
    sm_mhz: int | None = None
    joules: float | None = None
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def all_us(self) -> float:
        """All kernels of the call."""
        return self.us + self.other_us


def measure_rounds(
    calls: Mapping[str, Call], rounds: Rounds, row: int = 0
) -> dict[str, Timing | Exception]:
    """The time of each call, or why it has none. A call that fails leaves the later rounds."""
    order = random.Random(f"{rounds.seed} {row}")
    samples: dict[str, list[Samples]] = {name: [] for name in calls}
    failed: dict[str, Exception] = {}

    def attempt(name: str, is_warm_up: bool) -> None:
        call = calls[name]
        try:
            if is_warm_up:
                warm_up(call)
            elif len(samples[name]) * num_calls(call) < (call.max_repeat or math.inf):
                samples[name].append(rounds.sampler(call, num_calls(call)))
        except Exception as error:  # other people's code: refusing the shape, out of memory
            failed[name] = error

    def num_calls(call: Call) -> int:
        return min(rounds.num_calls, call.max_repeat or rounds.num_calls)

    try:
        for i in range(-1, rounds.num_rounds):
            names = [name for name in calls if name not in failed]
            order.shuffle(names)
            for name in names:
                attempt(name, is_warm_up=i < 0)
    finally:
        stop_recording()
    return {name: failed.get(name) or _timing(samples[name]) for name in calls}


def measure(call: Call, sampler: Sampler = sample_flushed, num_calls: int = 5) -> Timing:
    """The time of one call by itself. Raises: what the call raises."""
    rounds = Rounds(1, num_calls, sampler=sampler)
    timing = measure_rounds({"": call}, rounds)[""]
    if isinstance(timing, Exception):
        raise timing
    return timing


def _timing(samples: list[Samples]) -> Timing:
    medians = [statistics.median(s.us) for s in samples]
    middle = functools.partial(_median_of, samples)
    mhz = middle("sm_mhz")
    return Timing(
        us=statistics.median([us for s in samples for us in s.us]),
        spread=(min(medians), max(medians)),
        other_us=statistics.median([us for s in samples for us in s.other_us]),
        timer=samples[0].timer,
        span_us=middle("span_us"),
        sm_mhz=None if mhz is None else round(mhz),
        joules=middle("joules"),
        kernels={
            name: statistics.median(s.kernels.get(name, 0.0) for s in samples)
            for name in dict.fromkeys(name for s in samples for name in s.kernels)
        },
    )


def _median_of(samples: list[Samples], field: str) -> int | float | None:
    values = [value for s in samples if (value := getattr(s, field)) is not None]
    return statistics.median(values) if values else None
