"""TileConfig: how one GEMM is cut into tiles, the list of configs, and which one a shape gets.

A config changes the speed of a product, never its bits. The choice is a pure function of static
shapes and the number of multiprocessors, made when lowering and baked into the executable:

    time = waves * (num_k_blocks * k_block + epilogue) or bytes / bandwidth, and the launch

with the constants below, fitted to an H200 (docs/experiments.md), after a look into the table of
measured overrides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

_SCALE_BLOCK = 128
_CLOCK_MHZ = 1700  # under load, below its power limit
_LAUNCH_US = 3.0  # launch, first loads, drain
_WAVE_US = 0.3  # of waiting for the slowest tile
_NOT_HIDDEN = 0.1  # part of the shorter of computing and moving bytes that adds to the longer
_L2_BYTES_PER_CLOCK = 50  # L2 to one multiprocessor, all of them loading
_DRAM_BYTES_PER_US = 3.3e6  # what one launch reaches, ramps included; a long copy reaches 4.2e6
_MIN_K_BLOCK_CLOCKS = 215  # barrier, wgmma and promotion latency of one k-block
_STORE_BYTES_PER_CLOCK = 33
_TILE_CLOCKS = 300
# Part of the tensor cores' rate that the main loop reaches. 1d1d reads a scale for every column and
# promotes with twice as many instructions; two consumers of 256 columns have no registers left to
# read those scales under the multiplication, and a second accumulator leaves none at all, but in
# _TALL_1D1D.
_EFFICIENCY_1D2D = 0.83
_EFFICIENCY_1D1D = 0.63
_EFFICIENCY_1D1D_WIDE = 0.58
_EFFICIENCY_1D1D_ACCUMS = 0.45
_EFFICIENCY_1D1D_TALL = 0.69
# Cost, relative to a whole tile, of one whose rows end within its first consumer warpgroup.
_SHORT_TILE = 0.6


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One way to run the kernel of ffi/cuda/gemm.cuh.

    block_m, block_n: output tile of one CTA; below 64 rows only the loads are shorter.
    sub_n: n of one wgmma; divides block_n.
    num_consumers: warpgroups that multiply, each with its share of the rows.
    num_accums: wgmma accumulators in rotation; one less is queued ahead.
    num_stages: depth of the ring of operands in shared memory.
    num_slabs: 8 KiB staging slabs of each consumer for stores by TMA; 0 stores from registers.
    cluster_m, cluster_n: CTAs that share an rhs, or an lhs, tile by multicast.
    """

    block_m: int
    block_n: int
    sub_n: int
    num_consumers: int
    num_accums: int
    num_stages: int
    num_slabs: int
    cluster_m: int = 1
    cluster_n: int = 1

    def attributes(
        self,
        *,
        is_1d1d: bool,
        out_f32: bool,
        accumulate: bool,
        lhs_e5m2: bool,
        rhs_e5m2: bool,
        num_sms: int,
        grouping: int = 0,
    ) -> dict[str, np.int32]:
        """Members of the FFI call's `config` attribute."""
        how = dict(
            is_1d1d=is_1d1d,
            out_f32=out_f32,
            accumulate=accumulate,
            lhs_e5m2=lhs_e5m2,
            rhs_e5m2=rhs_e5m2,
            num_sms=num_sms,
            grouping=grouping,
        )
        return {key: np.int32(value) for key, value in (dataclasses.asdict(self) | how).items()}


# Tiles for few rows stream rhs: many stages, several batches queued, columns to fill the card.
CONFIGS: tuple[TileConfig, ...] = (
    TileConfig(16, 16, 16, 1, 4, 24, 0),
    TileConfig(16, 32, 32, 1, 4, 24, 0),
    TileConfig(16, 56, 56, 1, 2, 20, 0),
    TileConfig(16, 64, 64, 1, 2, 20, 0),
    TileConfig(16, 128, 64, 1, 2, 11, 0),
    TileConfig(64, 16, 16, 1, 4, 20, 0),
    TileConfig(64, 32, 32, 1, 4, 17, 0),
    TileConfig(64, 56, 56, 1, 2, 14, 0),
    TileConfig(64, 64, 64, 1, 2, 13, 0),
    TileConfig(64, 128, 64, 1, 2, 8, 0),
    TileConfig(128, 64, 64, 2, 2, 8, 0),
    TileConfig(128, 128, 64, 2, 2, 5, 2),
    TileConfig(128, 128, 128, 2, 1, 5, 2),
    TileConfig(128, 256, 128, 2, 1, 3, 4),
    TileConfig(128, 256, 128, 2, 1, 3, 4, cluster_m=2),
    TileConfig(192, 128, 128, 3, 1, 4, 2),
    TileConfig(192, 128, 128, 3, 1, 4, 2, cluster_n=2),
)
# A consumer of 128 rows reads the scales of its columns once for both halves. With two accumulators
# there are registers for 96 columns; their slabs take f32 alone.
_TALL_1D1D = TileConfig(256, 96, 96, 2, 2, 4, 2)

# (m, n, k, is_1d1d) -> config, measured on an H200 with 132 multiprocessors where the model's
# choice was slower: docs/experiments.md.
_OVERRIDES: dict[tuple[int, int, int, bool], TileConfig] = {
    (64, 24576, 1536, False): TileConfig(64, 64, 64, 1, 2, 13, 0),
    (128, 32768, 512, False): TileConfig(128, 128, 64, 2, 2, 5, 2),
}

# The attribute `grouping`: what the groups of a product cut.
GROUPED_ROWS, GROUPED_CONTRACTION = 1, 2

# Grouped kernels keep a table of groups in shared memory, and have no clusters.
GROUPED_CONFIGS: dict[int, tuple[TileConfig, ...]] = {
    GROUPED_ROWS: (
        TileConfig(64, 64, 64, 1, 2, 12, 0),
        TileConfig(64, 128, 64, 1, 2, 8, 0),
        TileConfig(128, 64, 64, 2, 2, 8, 0),
        TileConfig(128, 128, 64, 2, 2, 5, 2),
        TileConfig(128, 256, 128, 2, 1, 3, 4),
        TileConfig(192, 128, 128, 3, 1, 4, 2),
    ),
    GROUPED_CONTRACTION: (
        TileConfig(128, 128, 128, 2, 1, 5, 2),
        TileConfig(128, 256, 128, 2, 1, 3, 4),
        TileConfig(192, 128, 128, 3, 1, 4, 2),
    ),
}

_forced: list[TileConfig] = []


def configs(grouping: int = 0, *, is_1d1d: bool, out_f32: bool) -> tuple[TileConfig, ...]:
    """The configs that a product may get. grouping: 0, GROUPED_ROWS or GROUPED_CONTRACTION."""
    common = GROUPED_CONFIGS[grouping] if grouping else CONFIGS
    return (*common, _TALL_1D1D) if is_1d1d and out_f32 else common


def choose(
    m: int,
    n: int,
    k: int,
    *,
    is_1d1d: bool,
    out_f32: bool,
    accumulate: bool,
    num_sms: int = 132,
) -> TileConfig:
    """Config for out (m, n) = lhs (m, k) x rhs (n, k); extents >= 1."""
    if _forced:
        return _forced[-1]
    return _choose(m, n, k, is_1d1d, _out_bytes(out_f32, accumulate), num_sms)


def choose_grouped(
    m: int,
    n: int,
    k: int,
    num_groups: int,
    *,
    is_1d1d: bool,
    out_f32: bool,
    accumulate: bool,
    num_sms: int = 132,
) -> TileConfig:
    """Config for a grouped product, as if all groups were about as large.

    1d2d: m is the rows of all groups, n and k are of one. 1d1d: the contraction; m and n are of one
    group, k is the tokens of all.
    """
    if _forced:
        return _forced[-1]
    out_bytes = _out_bytes(out_f32, accumulate)
    return _choose_grouped(m, n, k, num_groups, is_1d1d, out_bytes, num_sms)


def _out_bytes(out_f32: bool, accumulate: bool) -> int:
    """Moved for each element of the result; 2 for bf16 alone."""
    return 4 + 4 * accumulate if out_f32 else 2


@contextlib.contextmanager
def override(config: TileConfig) -> Iterator[None]:
    """Within the context, lowering uses `config` for every product (tests and tuning)."""
    _forced.append(config)
    try:
        yield
    finally:
        _forced.pop()


@functools.lru_cache(maxsize=4096)
def _choose(m: int, n: int, k: int, is_1d1d: bool, out_bytes: int, num_sms: int) -> TileConfig:
    measured = _OVERRIDES.get((m, n, k, is_1d1d)) if num_sms == 132 else None
    if measured is not None:
        return measured
    candidates = configs(is_1d1d=is_1d1d, out_f32=out_bytes > 2)
    candidates = [c for c in candidates if c.cluster_m * c.cluster_n == 1]
    rows = 16 if m <= 16 else math.ceil(m / 64) * 64
    candidates = [c for c in candidates if c.block_m <= rows and (m <= 16 or c.block_m >= 64)]
    return min(candidates, key=lambda c: _time_us(c, m, n, k, is_1d1d, out_bytes, num_sms))


@functools.lru_cache(maxsize=4096)
def _choose_grouped(
    m: int, n: int, k: int, num_groups: int, is_1d1d: bool, out_bytes: int, num_sms: int
) -> TileConfig:
    def time_us(c: TileConfig) -> float:
        num_n = math.ceil(n / c.block_n)
        if is_1d1d:
            tiles = num_groups * math.ceil(m / c.block_m) * num_n
            num_k_blocks = k / num_groups / _SCALE_BLOCK
            dram_bytes = (m + n) * k + num_groups * m * n * out_bytes
        else:
            # On average half of the last tile of a group is empty.
            tiles = max(num_groups, m / c.block_m + num_groups / 2) * num_n
            num_k_blocks = math.ceil(k / _SCALE_BLOCK)
            dram_bytes = (m + num_groups * n) * k + m * n * out_bytes
        tile_clocks = _tile_clocks(c, num_k_blocks, is_1d1d, out_bytes)
        return _launch_us(max(1, tiles / num_sms + 0.5), tile_clocks, dram_bytes)

    grouping = GROUPED_CONTRACTION if is_1d1d else GROUPED_ROWS
    return min(configs(grouping, is_1d1d=is_1d1d, out_f32=out_bytes > 2), key=time_us)


def _time_us(
    c: TileConfig, m: int, n: int, k: int, is_1d1d: bool, out_bytes: int, num_sms: int
) -> float:
    """Predicted time of one launch."""
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


def _tile_clocks(c: TileConfig, num_k_blocks: int | float, is_1d1d: bool, out_bytes: int) -> float:
    """Predicted clocks of one tile."""
    rows = max(c.block_m, 64)
    k_block = max(
        rows * c.block_n / 32 / _efficiency(c, is_1d1d),
        (c.block_m + c.block_n) * _SCALE_BLOCK / _L2_BYTES_PER_CLOCK,
        _MIN_K_BLOCK_CLOCKS,
    )
    epilogue = _TILE_CLOCKS + c.block_m * c.block_n * out_bytes / _STORE_BYTES_PER_CLOCK
    return num_k_blocks * k_block + epilogue


def _efficiency(c: TileConfig, is_1d1d: bool) -> float:
    if not is_1d1d:
        return _EFFICIENCY_1D2D
    if c == _TALL_1D1D:
        return _EFFICIENCY_1D1D_TALL
    if c.num_accums > 1:
        return _EFFICIENCY_1D1D_ACCUMS
    return _EFFICIENCY_1D1D_WIDE if c.block_n > 128 else _EFFICIENCY_1D1D


def _launch_us(waves: int | float, tile_clocks: float, dram_bytes: int | float) -> float:
    """Predicted time of a launch from the tiles of one multiprocessor and the bytes of all."""
    compute_us = waves * tile_clocks / _CLOCK_MHZ
    dram_us = dram_bytes / _DRAM_BYTES_PER_US
    overlap = _NOT_HIDDEN * min(compute_us, dram_us)
    return max(compute_us, dram_us) + overlap + waves * _WAVE_US + _LAUNCH_US
