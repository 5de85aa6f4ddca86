"""Predicts the time of a weight gradient with a TileConfig:

    time = waves * (num_k_blocks * k_block + epilogue) or bytes / bandwidth, and the launch

The constants were fitted to an H200 (docs/experiments/README.md). The purpose is to rank configs.
`out_bytes` are the bytes moved for each element of the result.
"""

from __future__ import annotations

import math

from jax_fp8gemm._tuning.tile import TileConfig

_SCALE_BLOCK = 128
_CLOCK_MHZ = 1700  # under load, below its power limit
_LAUNCH_US = 3.0  # launch, first loads, drain
_WAVE_US = 0.3  # wait for the slowest tile of a wave
_NOT_HIDDEN = 0.1  # computing and moving bytes overlap, but for this part of the shorter
_L2_BYTES_PER_CLOCK = 50  # L2 to one multiprocessor, all of them loading
_DRAM_BYTES_PER_US = 3.3e6  # what one launch reaches, ramps included; a long copy reaches 4.2e6
_MIN_K_BLOCK_CLOCKS = 215  # barrier, wgmma and promotion latency of one k-block
_STORE_BYTES_PER_CLOCK = 33
_STORE_BYTES_PER_CLOCK_NARROW = 21  # in rows of 64 bytes: bf16 where 64 does not divide block_n
_TILE_CLOCKS = 300
# The part of the tensor cores' rate that the main loop reaches. 1d1d reads a scale for every column
# and promotes with twice as many instructions. WIDE: two consumers of 256 columns have no registers
# left to read those scales under the multiplication. ACCUMS: a second accumulator leaves none at
# all. TALL: but consumers of 128 rows have some beside it.
_EFFICIENCY_1D2D = 0.83
_EFFICIENCY_1D1D = 0.63
_EFFICIENCY_1D1D_WIDE = 0.58
_EFFICIENCY_1D1D_ACCUMS = 0.45
_EFFICIENCY_1D1D_TALL = 0.69
# Cost of a tile whose rows end within its first consumer warpgroup, relative to a whole tile.
_SHORT_TILE = 0.6


def time_us(
    c: TileConfig, m: int, n: int, k: int, is_1d1d: bool, out_bytes: int, num_sms: int
) -> float:
    """Returns the predicted time of one launch."""
    num_n = math.ceil(n / c.block_n)
    rest = m % c.block_m
    is_short = 0 < rest <= 64 and c.num_consumers > 1
    full = (math.ceil(m / c.block_m) - is_short) * num_n
    waves = math.ceil(full / num_sms)
    left = is_short * num_n - (waves * num_sms - full)
    if left > 0:
        waves += _SHORT_TILE * math.ceil(left / num_sms)
    tile_clocks = _tile_clocks(c, math.ceil(k / _SCALE_BLOCK), is_1d1d, out_bytes)
    return _launch_us(waves, tile_clocks, (m + n) * k + m * n * out_bytes)


def grouped_time_us(
    c: TileConfig,
    m: int,
    n: int,
    k: int,
    num_groups: int,
    is_1d1d: bool,
    out_bytes: int,
    num_sms: int,
) -> float:
    """Returns the predicted time of weight gradients of groups, as if all were about as large."""
    tiles = num_groups * math.ceil(m / c.block_m) * math.ceil(n / c.block_n)
    num_k_blocks = k / num_groups / _SCALE_BLOCK
    tile_clocks = _tile_clocks(c, num_k_blocks, is_1d1d, out_bytes)
    dram_bytes = (m + n) * k + num_groups * m * n * out_bytes
    return _launch_us(max(1, tiles / num_sms + 0.5), tile_clocks, dram_bytes)


def copy_time_us(num_bytes: int | float) -> float:
    """Returns the predicted time of a launch that moves these bytes and computes little."""
    return _launch_us(0, 0.0, num_bytes)


def _tile_clocks(c: TileConfig, num_k_blocks: int | float, is_1d1d: bool, out_bytes: int) -> float:
    """Returns the predicted clocks of one tile."""
    k_block = max(
        c.block_m * c.block_n / 32 / _efficiency(c, is_1d1d),
        (c.block_m + c.block_n) * _SCALE_BLOCK / _L2_BYTES_PER_CLOCK,
        _MIN_K_BLOCK_CLOCKS,
    )
    is_narrow = out_bytes == 2 and c.num_slabs > 0 and c.block_n % 64 != 0  # see SlabColumns
    store_rate = _STORE_BYTES_PER_CLOCK_NARROW if is_narrow else _STORE_BYTES_PER_CLOCK
    epilogue = _TILE_CLOCKS + c.block_m * c.block_n * out_bytes / store_rate
    return num_k_blocks * k_block + epilogue


def _efficiency(c: TileConfig, is_1d1d: bool) -> float:
    if not is_1d1d:
        return _EFFICIENCY_1D2D
    if c.block_m > 64 * c.num_consumers:  # 128 rows each
        return _EFFICIENCY_1D1D_TALL
    if c.num_accums > 1:
        return _EFFICIENCY_1D1D_ACCUMS
    return _EFFICIENCY_1D1D_WIDE if c.block_n > 128 else _EFFICIENCY_1D1D


def _launch_us(waves: int | float, tile_clocks: float, dram_bytes: int | float) -> float:
    """Returns the time of a launch, from the tiles of one multiprocessor and the bytes of all."""
    compute_us = waves * tile_clocks / _CLOCK_MHZ
    dram_us = dram_bytes / _DRAM_BYTES_PER_US
    overlap = _NOT_HIDDEN * min(compute_us, dram_us)
    return max(compute_us, dram_us) + overlap + waves * _WAVE_US + _LAUNCH_US
