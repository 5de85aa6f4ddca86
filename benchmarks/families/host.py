"""The family `host`: what one jitted call costs the host, against a jitted `x + 1`."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jax_fp8gemm
from benchmarks.data import normal, quantize_rows

_NUM_ROUNDS, _NUM_CALLS = 200, 16  # fewer calls a round than JAX lets be in flight


def host_times() -> dict[str, float]:
    """Microseconds of the host's clock to queue one call, by name: the median over rounds.

    The rounds of the functions alternate, so that a busy host slows all of them.
    """
    x, w = normal(128, 512, seed=0), normal(512, 128, seed=1)
    lhs = quantize_rows(x)
    rhs = jax.jit(lambda a: jax_fp8gemm.quantize(a, block=(128, 128)))(w.T)
    increment = jax.jit(lambda a: a + 1)
    matmul = jax.jit(jax_fp8gemm.matmul)
    scaled_matmul = jax.jit(jax_fp8gemm.scaled_matmul)
    dot = jax.jit(jnp.matmul)
    # What passing the four arrays of two ScaledArrays costs by itself.
    pass_on = jax.jit(lambda lhs, rhs, a: a + 1, keep_unused=True)
    calls: dict[str, Callable[[], Any]] = {
        "x + 1": lambda: increment(x),
        "jnp.matmul (bf16)": lambda: dot(x, w),
        "x + 1, two ScaledArrays unused": lambda: pass_on(lhs, rhs, x),
        "scaled_matmul": lambda: scaled_matmul(lhs, rhs),
        "matmul": lambda: matmul(x, w),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in tqdm(range(_NUM_ROUNDS), desc="bench host", leave=False):
        for name, call in calls.items():
            samples[name].append(_round_us(call))
    return {name: statistics.median(times) for name, times in samples.items()}


def _round_us(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    results = [call() for _ in range(_NUM_CALLS)]
    us = (time.perf_counter() - start) / _NUM_CALLS * 1e6
    jax.block_until_ready(results)
    return us
