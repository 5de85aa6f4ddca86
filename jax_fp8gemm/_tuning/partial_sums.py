"""Configs of dense 1d2d products whose contraction is added up in parts, and their time.

The CTAs of a cluster add up a part each (ffi/cuda/gemm/partial_sums.cuh). _data/split_k.py says
which products have parts, and how many. The constants of the time were fitted to an H200
(docs/experiments/split-k.md).
"""

from __future__ import annotations

import math

from jax_fp8gemm._tuning.tile import TileConfig

_ROWS = (8, 16, 32, 48, 64)
_NUM_PARTS = (6, 8)


def partial_sums_config(m: int, num_parts: int) -> TileConfig:
    """Returns the config of a product of up to 64 rows with so many parts."""
    rows = next(rows for rows in _ROWS if rows >= m)
    # Three accumulators of 64 rows fit the registers.
    return TileConfig(
        block_m=rows, block_n=64, sub_n=rows, num_consumers=2, num_accums=3 if rows == 64 else 4,
        num_stages=24, num_slabs=0, cluster_k=num_parts, partial_sums=True,
    )  # fmt: skip


PARTIAL_SUMS_CONFIGS: tuple[TileConfig, ...] = tuple(
    partial_sums_config(rows, num_parts) for rows in _ROWS for num_parts in _NUM_PARTS
)

_LAUNCH_US = 3.6  # of clusters, first loads, exchange, drain
_K_BLOCK_US, _ROW_US = 0.12, 0.0015  # a k-block of a CTA, and what each row of a tile adds to it
_DRAM_BYTES_PER_US = 3.9e6


def partial_sums_time_us(c: TileConfig, m: int, n: int, k: int, out_bytes: int) -> float:
    """Returns the predicted time of one launch. out_bytes: moved for each element of the result."""
    length = math.ceil(k / 128 / c.cluster_k)
    computing = length * (_K_BLOCK_US + _ROW_US * c.block_m)
    return _LAUNCH_US + computing + ((m + n) * k + m * n * out_bytes) / _DRAM_BYTES_PER_US
