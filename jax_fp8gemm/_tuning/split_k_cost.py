"""Predicts the time of a dense 1d2d product whose k-blocks the CTAs of a cluster divide:

    time = rounds * k-blocks of a CTA * k_block + bytes / bandwidth, and the launch

A round is a tile on every cluster. What is loaded is added and not overlapped: few multiprocessors
work, and each waits for its k-blocks. The constants were fitted to an H200
(docs/experiments/split-k.md).
"""

from __future__ import annotations

import math

from jax_fp8gemm._tuning.tile_config import TileConfig

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
