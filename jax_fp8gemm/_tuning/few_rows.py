"""Products of few rows whose kernel quantises lhs: which there are, and what they get."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_fp8gemm._runtime import hopper
from jax_fp8gemm._tuning import choose, tile_config
from jax_fp8gemm._tuning.tile import TileConfig

MOST_ROWS = 8  # mirrors kMostQuantizedRows in ffi/gemm/gemm_config.h
# A k-block of fewer columns takes less time than quantising it.
_LEAST_COLUMNS = 32
_LEAST_STAGES = 8  # as many as warps that quantise (cuda/gemm/lhs_quantizer.cuh)


def _takes(c: TileConfig) -> bool:
    """Returns whether a kernel with this config can quantise lhs as fast as it multiplies."""
    is_alone = c.cluster_m * c.cluster_n * c.cluster_k == 1 and c.num_consumers == 1
    return is_alone and c.block_n >= _LEAST_COLUMNS and c.num_stages >= _LEAST_STAGES


QUANTIZING_CONFIGS = tuple(
    dataclasses.replace(c, quantizes_lhs=True)
    for c in tile_config.configs(is_1d1d=False)
    if _takes(c)
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
    return dataclasses.replace(chosen, quantizes_lhs=True) if _takes(chosen) else None
