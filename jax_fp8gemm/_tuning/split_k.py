"""Configs of dense 1d2d products whose k-blocks the CTAs of a cluster divide, and their time:

    time = rounds * k-blocks of a CTA * k_block + bytes / bandwidth, and the launch

A round is a tile on every cluster. What is loaded is added and not overlapped: few multiprocessors
work, and each waits for its k-blocks. The constants were fitted to an H200
(docs/experiments/split-k.md).
"""

from __future__ import annotations

import math

from jax_fp8gemm._tuning.tile import TileConfig

# For dense 1d2d products of few rows, few columns and much k: a cluster divides the k-blocks of a
# tile (ffi/cuda/gemm/split_k.cuh). They have no kernel that accumulates.
SPLIT_K_CONFIGS: tuple[TileConfig, ...] = tuple(
    TileConfig(
        block_m=rows, block_n=64, sub_n=rows, num_consumers=2, num_accums=4, num_stages=24,
        num_slabs=0, cluster_k=cluster,
    )
    for rows in (8, 16) for cluster in (4, 8)
)  # fmt: skip
# The largest k that all of them take. Mirrors MostSplitK in ffi/gemm/gemm_config.cc.
SPLIT_K_MOST_K = 22_400


def split_k_configs(m: int, k: int) -> tuple[TileConfig, ...]:
    """Returns those of SPLIT_K_CONFIGS that a product of m rows may get.

    With less k they are up to 11 % slower than other tiles (docs/experiments/split-k.md).
    """
    if not 2048 <= k <= SPLIT_K_MOST_K:
        return ()
    return tuple(c for c in SPLIT_K_CONFIGS if c.block_m >= m)


_LAUNCH_US = 3.4  # of clusters, first loads, exchange, drain
_K_BLOCK_US = 0.07  # what a CTA multiplies
_ADD_US = 0.0085  # to add 8 rows of a k-block; each CTA adds those of its whole cluster
_DRAM_BYTES_PER_US = 3.9e6
# Clusters that run at a time on 132 multiprocessors, by size. 30 of four ran on an H100, 32 did
# not; 14 of eight ran on an H200, 16 did not.
_MOST_CLUSTERS = {4: 30, 8: 14}


def split_k_time_us(c: TileConfig, m: int, n: int, k: int, out_bytes: int, num_sms: int) -> float:
    """Returns the predicted time of one launch. out_bytes: moved for each element of the result."""
    num_tiles = math.ceil(m / c.block_m) * math.ceil(n / c.block_n)
    num_clusters = min(_MOST_CLUSTERS[c.cluster_k], max(1, num_sms // c.cluster_k))
    rounds = math.ceil(num_tiles / num_clusters)
    adding = _ADD_US * c.cluster_k * (c.block_m // 8)
    computing = rounds * math.ceil(k / 128 / c.cluster_k) * (_K_BLOCK_US + adding)
    moving = ((m + n) * k + m * n * out_bytes) / _DRAM_BYTES_PER_US
    return _LAUNCH_US + computing + moving
