"""Products of few rows whose kernel quantises lhs: which there are, and what they get."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_fp8gemm._runtime import hopper
from jax_fp8gemm._tuning import choose, split_k, tile_config
from jax_fp8gemm._tuning.tile import TileConfig

# A k-block of fewer columns takes less time than quantising it.
_LEAST_COLUMNS = 32
_LEAST_STAGES = 8  # as many as warps that quantise (cuda/gemm/lhs_quantizer.cuh)
# Where a cluster divides k, the most k-blocks of a CTA, by rows of a tile. With 16 rows and 14 to
# 20 k-blocks two kernels were as fast or faster (docs/experiments/calls.md).
_MOST_K_BLOCKS = {8: 20, 16: 8}


def _most_rows(c: TileConfig) -> int:
    """Returns how many rows a kernel with this config can quantise, or 0.

    With more rows, or in other tiles, quantising takes longer than multiplying.
    """
    if c.cluster_k > 1:  # each CTA quantises its own k-blocks
        return 0 if c.partial_sums else c.block_m
    is_alone = c.cluster_m * c.cluster_n == 1 and c.num_consumers == 1
    takes = is_alone and c.block_n >= _LEAST_COLUMNS and c.num_stages >= _LEAST_STAGES
    return 8 if takes else 0  # mirrors MostQuantizedRows in ffi/gemm/gemm_config.cc


def _takes(c: TileConfig, m: int, k: int) -> bool:
    if c.cluster_k > 1 and math.ceil(k / 128 / c.cluster_k) > _MOST_K_BLOCKS.get(c.block_m, 0):
        return False
    return m <= _most_rows(c)


QUANTIZING_CONFIGS = tuple(
    dataclasses.replace(c, quantizes_lhs=True)
    for c in (*tile_config.configs(is_1d1d=False), *split_k.SPLIT_K_CONFIGS)
    if _most_rows(c)
)
_MOST_ROWS = max(map(_most_rows, QUANTIZING_CONFIGS))


def quantizing_config(
    m: Any, n: Any, k: Any, *, out_f32: bool, num_sms: int = hopper.NUM_SMS
) -> TileConfig | None:
    """Returns the config by which a product of lhs (m, k) and rhs (n, k) quantises lhs.

    None: it is not faster than two kernels, or cannot be computed so, or an extent is symbolic.
    """
    if not all(isinstance(extent, int) and extent > 0 for extent in (m, n, k)):
        return None
    if m > _MOST_ROWS or k % 8:
        return None
    how: dict[str, Any] = dict(is_1d1d=False, out_f32=out_f32, accumulate=False)
    chosen = choose.choose(m, n, k, **how, num_sms=num_sms)
    if chosen.quantizes_lhs:  # choose.override
        return chosen
    return dataclasses.replace(chosen, quantizes_lhs=True) if _takes(chosen, m, k) else None
