"""How calls are timed beside each other: orders, medians, failures, and samples of one call."""

import random

import jax.numpy as jnp
import pytest

from benchmarks.timing import queues, timer
from benchmarks.timing.cupti import Activity
from benchmarks.timing.rounds import Rounds, Timing, measure, measure_rounds
from benchmarks.timing.timer import Call, Samples

QUEUE = queues.JaxQueue(flush_bytes=4096)


def call(run=lambda: jnp.zeros(()), **how) -> Call:
    return Call(run, QUEUE, **how)


def test_every_round_has_an_order_of_its_own_and_the_same_every_time():
    calls = {name: call() for name in "abcd"}
    names = {id(c): name for name, c in calls.items()}

    def orders(seed, row):
        order = []

        def sample(c, num_calls):
            order.append(names[id(c)])
            return Samples([1.0] * num_calls)

        measure_rounds(calls, Rounds(6, 2, seed, sample), row)
        return ["".join(order[i : i + 4]) for i in range(0, len(order), 4)]

    first = orders(0, 0)
    assert len(first) == 6 and all(sorted(order) == list("abcd") for order in first)
    assert len(set(first)) > 2 and first == orders(0, 0)
    assert first != orders(1, 0) and first != orders(0, 1)


def test_the_time_is_the_median_of_all_samples_and_the_spread_that_of_rounds():
    rounds = iter([[10.0, 30.0, 12.0], [11.0, 11.0, 50.0], [9.0, 9.5, 8.0]])
    sampler = lambda call, num_calls: Samples(next(rounds), [1.0, 2.0, 3.0], sm_mhz=1500)
    timing = measure_rounds({"": call()}, Rounds(3, 3, sampler=sampler))[""]
    assert timing == Timing(11.0, (9.0, 12.0), other_us=2.0, sm_mhz=1500)
    assert isinstance(timing, Timing) and timing.all_us == 13.0


def test_the_time_of_each_kernel_is_the_median_of_rounds():
    rounds = iter([{"a": 3.0, "b": 1.0}, {"a": 5.0}, {"a": 4.0, "b": 2.0}])
    sampler = lambda call, num_calls: Samples([9.0], kernels=next(rounds))
    timing = measure_rounds({"": call()}, Rounds(3, 1, sampler=sampler))[""]
    assert isinstance(timing, Timing) and timing.kernels == {"a": 4.0, "b": 1.0}


def test_a_call_that_fails_leaves_the_others():
    runs = []

    def breaks():
        runs.append(0)
        if len(runs) > 3:  # two to warm up
            raise RuntimeError("out of memory")

    def sample(c, num_calls):
        c.run()
        return Samples([1.0])

    timings = measure_rounds({"good": call(), "bad": call(breaks)}, Rounds(5, sampler=sample))
    assert timings["good"] == Timing(1.0, (1.0, 1.0))
    assert isinstance(timings["bad"], RuntimeError) and len(runs) == 4
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(call(breaks), sample)


def test_slow_calls_are_repeated_less():
    nums = []

    def sample(c, num_calls):
        nums.append(num_calls)
        return Samples([1.0] * num_calls)

    measure_rounds({"": call(max_repeat=3)}, Rounds(5, 4, sampler=sample))
    assert nums == [3]
    nums.clear()
    measure_rounds({"": call(max_repeat=8)}, Rounds(5, 4, sampler=sample))
    assert nums == [4, 4]


@pytest.fixture
def fake_record(monkeypatch):
    """Runs the steps, each of which is one activity of 5 us after a gap of 1 us."""
    monkeypatch.setattr(timer, "_flush_counts", {})

    def record(steps, queue):
        for step in steps:
            step()
        queue.wait()
        return [Activity("kernel", 6000 * i, 6000 * i + 5000) for i in range(len(steps))]

    monkeypatch.setattr(timer, "_record", record)


@pytest.mark.parametrize("flush", queues.FLUSHES)
def test_samples_leave_the_flush_out(fake_record, flush):
    runs = []
    samples = timer.sample_flushed(call(lambda: runs.append(0)), 4, flush)
    assert samples.us == [5.0] * 4 and samples.other_us == [0.0] * 4 and len(runs) == 4
    assert timer.sample_flushed(call(kernel="kern"), 2, flush).us == [5.0, 5.0]
    with pytest.raises(ValueError, match=r"a kernel named \*other\* must run"):
        timer.sample_flushed(call(kernel="other"), 2, flush)


def test_chains_have_a_span_with_the_gaps(fake_record):
    samples = timer.sample_chain(call(), 3)
    assert samples.us == [5.0] * 3 and samples.span_us == pytest.approx(17 / 3)
    assert samples.kernels == {"kernel": pytest.approx(5.0)}
    sustained = timer.sample_sustained(call(), 0, seconds=1e-4)
    assert sustained.us == [5.0] and len(sustained.other_us) == 1


def test_seeds_are_those_of_python():
    # The order of a row is to be found again from its file: random.Random of this text.
    names = list("abcd")
    random.Random("0 3").shuffle(names)
    seen = []
    sampler = lambda c, num: seen.append(c.kernel) or Samples([1.0])
    calls = {name: call(kernel=name) for name in "abcd"}
    measure_rounds(calls, Rounds(1, sampler=sampler), row=3)
    order = random.Random("0 3")
    for _ in range(2):  # the first order is that of the warm-up
        names = list("abcd")
        order.shuffle(names)
    assert seen == names
