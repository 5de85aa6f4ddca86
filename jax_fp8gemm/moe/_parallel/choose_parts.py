"""choose_parts: the number of parts that makes an expert-parallel layer fastest, by stated rates.

Forward and backward of one layer on one device, in seconds. D is the time that tokens take to their
experts, R that of the results back, and P that of the products forward. Products backward take 2 P,
and half of that is gradients of weights, behind which dx travels. With c parts

    forward   (D + R) / c + max(P, (c - 1) / c (D + R) + P / c)
    backward  D / c       + max(2 P, (c - 1) / c D + R + P / c)

In each line the first term is what nothing hides: the first part's way there and, forward, the last
one's way back. The second is the longer of what products take, and what the rest of the exchange
takes behind the products of the first part that it waits for. Each part costs time of its own, and
so do the sums of weight gradients over several parts, which are f32 and rounded in the end.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_fp8gemm.moe._parallel.exchange import RATES
from jax_fp8gemm.moe._parallel.exchange_kinds import AllGather, Exchange, RaggedAllToAll
from jax_fp8gemm.moe._parallel.parts import NUMBERS

FLOP_RATE = 1.03e15  # of experts on an H200, all kernels together: `bench moe`
# Of 16 experts of 2048 tokens on an H200, 470 M weights: a kernel that adds to f32 gradients
# reaches 947 TFLOPS, and 997 where it stores them. That is 0.1 ms.
ACCUMULATE_SECONDS = 0.22e-12  # a weight
MEMORY_RATE = 4e12  # bytes/s, assumed: what a copy reaches of an H200's 4.8e12
# Launches, the latencies of 9 collectives, shorter products, and multiprocessors that collectives
# take from them. On 2 H200s, with 16 experts of DeepSeek-V3's sizes and 8192 tokens a GPU, 2 and 4
# parts took 2.5 and 6.7 ms longer than one. This is what these formulas leave unexplained, a part.
PART_SECONDS = 1.8e-3


def choose_parts(
    exchange: Exchange, num_experts: int, d: int, f: int, dtype: Any, fp8_combine: bool
) -> int:
    """Returns the number of parts in which the layer takes the least time.

    Args:
      exchange: that of all tokens of a device in one part.
      num_experts: the number of experts of a device whose weights have a gradient.
      d, f: the extents of w_down (experts, f, d).
      dtype: that of the tokens and of the weights.
      fp8_combine: that of the recipe.
    """
    there, back = _exchange_seconds(exchange, d, jnp.dtype(dtype).itemsize, fp8_combine)
    products = 6 * exchange.tokens * exchange.top_k * d * f / FLOP_RATE
    num_weights = 3 * num_experts * d * f

    def seconds(num_parts: int) -> float:
        own = part_seconds(num_parts, num_weights, jnp.dtype(dtype).itemsize)
        return layer_seconds(num_parts, there, back, products) + own

    return min(NUMBERS, key=seconds)


def layer_seconds(num_parts: int, there: float, back: float, products: float) -> float:
    """Returns the time of a layer, without what each part costs by itself."""
    c = num_parts
    rest = (c - 1) / c
    forward = (there + back) / c + max(products, rest * (there + back) + products / c)
    return forward + there / c + max(2 * products, rest * there + back + products / c)


def part_seconds(num_parts: int, num_weights: int, weight_bytes: int) -> float:
    """Returns what several parts cost, besides the exchange and the products.

    Args:
      num_weights: of a device, those that have a gradient.
      weight_bytes: the bytes of a weight; if 4, sums of gradients need no rounding.
    """
    if num_parts == 1:
        return 0.0
    rounding = (4 + weight_bytes) / MEMORY_RATE if weight_bytes < 4 else 0.0
    accumulating = (num_parts - 1) * ACCUMULATE_SECONDS
    return (num_parts - 1) * PART_SECONDS + num_weights * (accumulating + rounding)


def _exchange_seconds(
    exchange: Exchange, d: int, itemsize: int, fp8_combine: bool
) -> tuple[float, float]:
    """Returns D and R: what a device receives from the others, over the rates of XLA's collectives.

    The rows of ragged_all_to_all are counted as those that it has room for.
    """
    quantised = d + 4 * -(-d // 128)
    rows = (exchange.size - 1) * exchange.slots
    there_by, back_by = "all_to_all", "all_to_all"
    if isinstance(exchange, AllGather):
        there_by = "all_gather"
    elif isinstance(exchange, RaggedAllToAll):
        there_by = back_by = "ragged_all_to_all"
    there = rows * (quantised + 8 * exchange.top_k) / RATES[there_by].bytes_per_second
    return there, rows * (quantised if fp8_combine else itemsize * d) / RATES[
        back_by
    ].bytes_per_second
