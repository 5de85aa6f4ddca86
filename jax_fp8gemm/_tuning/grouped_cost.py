"""Predicts the time of a product of groups of rows with a TileConfig:

    time = rounds * tile or bytes / bandwidth, and the launch

The sizes of groups are not known when a config is chosen. So tiles are counted for groups of
several sizes around the mean. The clocks of a k-block are those of a dense product
(_tuning/dense_cost.py), at other rates. The constants here were fitted to the times of many configs
on 80 shapes drawn at random, on an H200, and some of them to 414 other shapes
(docs/experiments/grouped-choice.md). The purpose is to rank configs.
"""

from __future__ import annotations

import math

from jax_fp8gemm._tuning.dense_cost import (
    SCALE_BLOCK,
    Rates,
    k_block_clocks,
    row_split,
    store_clocks,
)
from jax_fp8gemm._tuning.tile import TileConfig
from jax_fp8gemm._tuning.tile_config import TILE_128X128_SUB64, TILE_128X256

_RATES = Rates(
    {(1, 4): 0.567, (1, 2): 0.667, (2, 2): 0.865, (2, 1): 1.03, (3, 1): 0.98},
    one_batch={1: 0.862, 2: 1.0},
    l2_bytes_per_clock=8680,
    split_line=1.26,
    split_sector_clocks=0.0,  # not fitted
)
_CLOCK_MHZ = 1700  # under load, below its power limit
_LAUNCH_US = 2.7  # launch, first loads, drain
_ROUND_US = 0.175  # between two tiles of a multiprocessor
# More than the memory moves: where tiles take about as long as the bytes, they decide.
_DRAM_BYTES_PER_US = 6.1e6
_NOT_HIDDEN = 0.16  # of two things that overlap, the part of the shorter that adds to the longer
_MOST_SIZES, _SPREAD = 12, 0.5  # of groups: even steps around their mean, at most so far from it
_FEW_ROWS = 32
_MANY_TILES, _MOST_TILES = 6, 30  # of 128 columns for each multiprocessor
_PART_ROWS = 32  # of the rows of a group's last tile, as many are loaded at a time

# Cost of a tile whose rows end within its first consumer warpgroup, relative to a whole tile.
_SHORT_TILE = 0.77
# Of a group's last tile whose operands are exchanged (gemm/exchanged_tile.cuh).
_MOST_EXCHANGED_ROWS = 77
_EXCHANGED_K_BLOCK_CLOCKS = 1084
_EXCHANGED_STORE_BYTES_PER_CLOCK = 5.5
_EXCHANGED_SPLIT = 0.37  # the part by which rows that begin inside a line make a k-block longer


def grouped_rows_time_us(
    c: TileConfig, m: int, n: int, k: int, num_groups: int, out_bytes: int, num_sms: int
) -> float:
    """Returns the predicted time of one launch.

    m: rows of all groups. n, k: of one group. out_bytes: moved for each element of the result.
    """
    num_k_blocks = math.ceil(k / SCALE_BLOCK)
    num_n = num_groups * math.ceil(n / c.block_n)
    num_m, clocks = 0.0, 0.0  # tiles of a group along m, and the clocks of all of them: means
    num_sizes = min(num_groups, _MOST_SIZES)
    for i in range(num_sizes):
        size = 1 + _SPREAD * ((2 * i + 1) / num_sizes - 1)
        rows = max(1.0, size * m / num_groups)
        whole = math.ceil(rows / c.block_m) - 1
        busy = min(num_sms, (whole + 1) * num_n)
        num_m += (whole + 1) / num_sizes
        clocks += _last_tile_clocks(c, rows - whole * c.block_m, k, busy, out_bytes) / num_sizes
        if whole > 0:
            k_blocks = num_k_blocks * k_block_clocks(c, c.block_m, k, busy, _RATES)
            tile_clocks = k_blocks + store_clocks(c, c.block_m, out_bytes)
            clocks += whole * tile_clocks / num_sizes
    rounds = math.ceil(num_m * num_n / num_sms)
    computing = rounds * clocks / num_m / _CLOCK_MHZ
    moving = ((m + num_groups * n) * k + m * n * out_bytes) / _DRAM_BYTES_PER_US
    both = max(computing, moving) + _NOT_HIDDEN * min(computing, moving)
    return both + rounds * _ROUND_US + _LAUNCH_US


def _last_tile_clocks(c: TileConfig, rows: float, k: int, busy: int, out_bytes: int) -> float:
    """Returns the clocks of the last tile of a group, which has so many rows."""
    num_k_blocks = math.ceil(k / SCALE_BLOCK)
    if _exchanges(c) and rows <= _MOST_EXCHANGED_ROWS:
        num_bytes = rows * c.block_n * out_bytes
        store = num_bytes / _EXCHANGED_STORE_BYTES_PER_CLOCK
        split = 1 + _EXCHANGED_SPLIT * (row_split(k, _RATES) - 1)
        return num_k_blocks * _EXCHANGED_K_BLOCK_CLOCKS * split + store
    loaded = min(c.block_m, math.ceil(rows / _PART_ROWS) * _PART_ROWS)
    clocks = num_k_blocks * k_block_clocks(c, loaded, k, busy, _RATES)
    return clocks * (_SHORT_TILE if c.num_consumers > 1 and rows <= 64 else 1.0)


def is_for_rows(c: TileConfig, rows: float, n: int, num_groups: int, num_sms: int) -> bool:
    """Returns whether groups of so many rows on average may get the config.

    With few rows and many tiles for each multiprocessor the memory decides, and configs differ by
    3 %. But where most groups are empty and some are large, tiles of 128 rows lose least.
    """
    if rows > _FEW_ROWS:
        return True
    tiles = num_groups * math.ceil(n / TILE_128X128_SUB64.block_n) / num_sms
    if tiles > _MANY_TILES:
        return c == (TILE_128X256 if tiles > _MOST_TILES else TILE_128X128_SUB64)
    return c.block_m == 64 or _exchanges(c)


def _exchanges(c: TileConfig) -> bool:
    """Returns Tile::kExchanges of the kernel."""
    return (c.block_m, c.block_n, c.num_consumers, c.num_accums) == (128, 256, 2, 1)
