"""Products of few rows whose kernel quantises lhs: which there are, and what they get."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_fp8gemm._runtime import hopper
from jax_fp8gemm._tuning import choose, split_k, tile_config
from jax_fp8gemm._tuning.tile import TileConfig

MOST_ROWS = 8  # mirrors kMostQuantizedRows in ffi/gemm/gemm_config.h
_LEAST_STAGES = 8  # as many as warps that quantise (cuda/gemm/lhs_quantizer.cuh)
# Up to where one kernel was timed, and took less than two (docs/experiments/calls.md): k of tiles
# with fewer than 32 columns, whose k-blocks take less time than quantising 8 rows; and k-blocks of
# a CTA where a cluster divides k.
_NARROW_MOST_K = 4096
_MOST_K_BLOCKS = 20


def _can_quantise(c: TileConfig) -> bool:
    """Returns whether a kernel with this config can quantise lhs."""
    if c.cluster_k > 1:  # each CTA quantises its own k-blocks
        return c.block_m == MOST_ROWS and not c.partial_sums
    is_alone = c.cluster_m * c.cluster_n == 1 and c.num_consumers == 1
    return is_alone and c.num_stages >= _LEAST_STAGES


def _gains(c: TileConfig, m: int, k: int) -> bool:
    """Returns whether it takes less time than the quantiser and the product."""
    if c.cluster_k > 1:
        return math.ceil(k / 128 / c.cluster_k) <= _MOST_K_BLOCKS
    return c.block_n >= 32 or m <= 4 or k <= _NARROW_MOST_K


QUANTIZING_CONFIGS = tuple(
    dataclasses.replace(c, quantizes_lhs=True)
    for c in (*tile_config.configs(is_1d1d=False), *split_k.SPLIT_K_CONFIGS)
    if _can_quantise(c)
)


def quantizing_config(
    m: Any, n: Any, k: Any, *, out_f32: bool, num_sms: int = hopper.NUM_SMS
) -> TileConfig | None:
    """Returns the config by which a product of lhs (m, k) and rhs (n, k) quantises lhs.

    None: it is not faster than two kernels, or cannot be computed so, or an extent is symbolic.
    """
    if not all(isinstance(extent, int) and extent > 0 for extent in (m, n, k)):
        return None
    if m > MOST_ROWS or k % 8:
        return None
    how: dict[str, Any] = dict(is_1d1d=False, out_f32=out_f32, accumulate=False)
    chosen = choose.choose(m, n, k, **how, num_sms=num_sms)
    if chosen.quantizes_lhs:  # choose.override
        return chosen
    if not _can_quantise(chosen) or not _gains(chosen, m, k):
        return None
    return dataclasses.replace(chosen, quantizes_lhs=True)
