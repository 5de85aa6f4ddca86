"""Predicts the time of a dense 1d2d product with a TileConfig:

    time = rounds * (num_k_blocks * k_block + epilogue) or bytes / bandwidth, and the launch

A round is a tile on every multiprocessor. The clocks of a k-block are those of its wgmma, of its
loads from the L2 or of its latency, whichever is most. The constants were fitted to the times of
many configs on shapes drawn at random, on an H200 (docs/experiments/gemm-choice.md). The purpose is
to rank configs. Products of groups of rows have grouped_cost.py, weight gradients cost.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from jax_fp8gemm._tuning.tile import TileConfig

SCALE_BLOCK = 128
_CLOCK_MHZ = 1700  # under load, below its power limit
_LAUNCH_US = 2.71  # launch, first loads, drain
_CLUSTER_LAUNCH_US = 0.3  # clusters begin together
_ROUND_US = 0.251  # wait for the slowest tile of a round
_NOT_HIDDEN = 0.214  # of two things that overlap, the part of the shorter that adds to the longer
_DRAM_BYTES_PER_US = 3.9e6

# The part of the rate that is left for two accumulators where 32 does not divide the columns of a
# tile: scale blocks then cut it into parts of 16 columns with scales of their own.
_NARROW_PARTS = 0.98
_NARROW_COLUMNS = 15.8  # a wgmma takes as long as if it had so many columns more

# A row of a k-block begins in the middle of a line of 128 bytes of the L2 unless 128 divides k, and
# in the middle of a sector of 32 unless 32 does. In the latter case it takes the L2 this much
# longer.
_SPLIT_SECTOR = 2.2
_SPLIT_LATENCY = 0.2  # the part of it that latency grows by, where one lane copies

_LATENCY_CLOCKS = {1: 233, 2: 233, 4: 176}  # least clocks of a k-block, by accumulators
# CTAs of a cluster wait for each other: with one consumer, and with more.
_CLUSTER_OF_ONE = 1.04
_CLUSTER = 1.12
# Multiprocessors that clusters of four find, of 132. 30 such clusters ran at a time on an H100, and
# 32 did not.
_SMS_OF_FOURS = 120

_TILE_CLOCKS = 269
_STORE_BYTES_PER_CLOCK = 55.5
_STORE_BYTES_PER_CLOCK_NARROW = 25.4  # in rows of 64 bytes, where 64 does not divide block_n
_STORE_BYTES_PER_CLOCK_WHOLE = 30  # in whole rows of a tile, where 32 does not divide block_n
_STORE_BYTES_PER_CLOCK_DIRECT = 15.9  # from registers, of the rows that lhs has
_SLAB_CLOCKS = 150  # a lone consumer waits for its slabs
# Cost of a tile whose rows end within its first consumer warpgroup, relative to a whole tile.
_SHORT_TILE = 0.9


class Rates(NamedTuple):
    """The constants of a k-block that products without groups and products of groups do not share.

    efficiency: the part of the tensor cores' rate that 128 columns a wgmma reach, by consumers and
      accumulators.
    one_batch: the part of it that is left where a k-block is one batch for each of two consumers,
      by accumulators. Then fewer batches hide a promotion.
    l2_bytes_per_clock: from the L2 to all multiprocessors that have a tile. They share it equally,
      few of them as well as all.
    split_line: how much longer the L2 takes for a row that begins in the middle of a line.
    split_sector_clocks: least clocks in which a multiprocessor copies a row that begins in the
      middle of a sector.
    """

    efficiency: Mapping[tuple[int, int], float]
    one_batch: Mapping[int, float]
    l2_bytes_per_clock: int
    split_line: float
    split_sector_clocks: float


DENSE_RATES = Rates(
    {(1, 4): 0.567, (1, 2): 0.667, (2, 2): 0.96, (2, 1): 0.91, (3, 1): 0.91},
    one_batch={1: 0.9, 2: 0.9},
    l2_bytes_per_clock=9000,
    split_line=1.2,
    split_sector_clocks=2.8,
)


def dense_time_us(c: TileConfig, m: int, n: int, k: int, out_bytes: int, num_sms: int) -> float:
    """Returns the predicted time of one launch. out_bytes: moved for each element of the result."""
    num_m, num_n = (
        math.ceil(extent / (block * cluster)) * cluster
        for extent, block, cluster in ((m, c.block_m, c.cluster_m), (n, c.block_n, c.cluster_n))
    )
    if c.cluster_m * c.cluster_n > 2:
        num_sms = min(num_sms, _SMS_OF_FOURS)
    busy = min(num_m * num_n, num_sms)
    k_blocks = math.ceil(k / SCALE_BLOCK) * k_block_clocks(c, m, k, busy, DENSE_RATES)
    clocks = k_blocks + _TILE_CLOCKS + store_clocks(c, m, out_bytes)
    rounds = _rounds(c, m, num_m, num_n, num_sms)
    computing = rounds * clocks / _CLOCK_MHZ
    moving = ((m + n) * k + m * n * out_bytes) / _DRAM_BYTES_PER_US
    launch = _LAUNCH_US + (_CLUSTER_LAUNCH_US if c.cluster_m * c.cluster_n > 1 else 0)
    return _overlap(computing, moving) + rounds * _ROUND_US + launch


def _rounds(c: TileConfig, m: int, num_m: int, num_n: int, num_sms: int) -> float:
    """Returns the tiles of the multiprocessor that has most of them."""
    is_short = 0 < m % c.block_m <= 64 and c.num_consumers > 1 and c.cluster_m * c.cluster_n == 1
    full = (num_m - is_short) * num_n
    rounds = math.ceil(full / num_sms)
    left = max(0, is_short * num_n - (rounds * num_sms - full))
    return rounds + _SHORT_TILE * math.ceil(left / num_sms)


def k_block_clocks(c: TileConfig, m: int, k: int, busy: int, rates: Rates) -> float:
    """Returns the clocks of a k-block of one tile, while `busy` multiprocessors have one."""
    efficiency = rates.efficiency[c.num_consumers, c.num_accums]
    if c.num_consumers == 2 and c.sub_n == c.block_n:
        efficiency *= rates.one_batch[c.num_accums]
    if c.num_consumers == c.num_accums == 2 and c.block_n % 32 != 0:
        efficiency *= _NARROW_PARTS
    efficiency *= (1 + _NARROW_COLUMNS / 128) / (1 + _NARROW_COLUMNS / c.sub_n)
    multiplying = c.block_m * c.block_n / 32 / efficiency
    split = row_split(k, rates)
    rows = min(c.block_m, m) / c.cluster_n + c.block_n / c.cluster_m
    num_bytes = rows * SCALE_BLOCK * split
    loading = num_bytes * busy / rates.l2_bytes_per_clock
    if k % 32 != 0:
        loading = max(loading, rows * rates.split_sector_clocks)
    growth = _SPLIT_LATENCY * (split - 1) if c.num_consumers > 1 else 0.0
    latency = _LATENCY_CLOCKS[c.num_accums] * (1 + growth)
    clocks = max(_overlap(multiplying, loading), latency)
    if c.cluster_m * c.cluster_n == 1:
        return clocks
    return clocks * (_CLUSTER_OF_ONE if c.num_consumers == 1 else _CLUSTER)


def row_split(k: int, rates: Rates) -> float:
    """Returns how much longer the L2 takes to read a k-block's part of a row of k values."""
    return 1.0 if k % 128 == 0 else rates.split_line if k % 32 == 0 else _SPLIT_SECTOR


def store_clocks(c: TileConfig, m: int, out_bytes: int) -> float:
    """Returns the clocks that a consumer takes to store its part of a tile."""
    is_whole = c.block_n % 32 != 0  # see SlabColumns
    if c.num_slabs == 0 or (is_whole and out_bytes > 2):
        return min(c.block_m, m) * c.block_n * out_bytes / _STORE_BYTES_PER_CLOCK_DIRECT
    rate = _STORE_BYTES_PER_CLOCK
    if c.block_n % 64 != 0:
        rate = _STORE_BYTES_PER_CLOCK_WHOLE if is_whole else _STORE_BYTES_PER_CLOCK_NARROW
    waiting = _SLAB_CLOCKS if c.num_consumers == 1 else 0
    return waiting + c.block_m * c.block_n * out_bytes / rate


def _overlap(a: float, b: float) -> float:
    """Returns the time of two things that overlap, but for a part."""
    return max(a, b) + _NOT_HIDDEN * min(a, b)
