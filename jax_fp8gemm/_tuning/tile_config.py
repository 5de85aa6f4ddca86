"""TileConfig: how one GEMM is cut into tiles, and the lists of configs.

A config changes the speed of a product, never its bits. _tuning/choose.py says which one a shape
gets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One way to run the GEMM kernel.

    Attributes:
      block_m, block_n: output tile of one CTA. Below 64 rows only the loads are shorter.
      sub_n: n of one wgmma; divides block_n.
      num_consumers: warpgroups that multiply, each its share of the rows.
      num_accums: wgmma accumulators in rotation; one batch less is queued ahead.
      num_stages: depth of the ring of operands in shared memory, in k-blocks.
      num_slabs: 8 KiB slabs in which each consumer stages results for TMA; 0: it stores from
        registers.
      cluster_m, cluster_n: CTAs that share a tile of rhs, or of lhs, by multicast.
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
        """Returns the members of the attribute `config` of an FFI call."""
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


def formats(lhs: Any, rhs: Any) -> dict[str, bool]:
    """Returns the formats of FP8 operands, as TileConfig.attributes takes them."""
    is_e5m2 = lambda x: x.dtype == ml_dtypes.float8_e5m2
    return dict(lhs_e5m2=is_e5m2(lhs), rhs_e5m2=is_e5m2(rhs))


# Tiles for few rows stream rhs: they have many stages, several batches in the queue, and few
# columns, so that there are tiles for all SMs.
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
    TileConfig(192, 128, 128, 3, 1, 4, 2),
)
# These are slower on most shapes (docs/experiments/gemm-memory.md), so no product gets them. Tests
# and bench run them.
CLUSTER_CONFIGS = (
    TileConfig(128, 256, 128, 2, 1, 3, 4, cluster_m=2),
    TileConfig(192, 128, 128, 3, 1, 4, 2, cluster_n=2),
)
# A consumer of 128 rows reads the scales of its columns once for both halves. Two accumulators
# leave registers for 96 columns.
_TALL_1D1D = TileConfig(256, 96, 96, 2, 2, 4, 2)

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


def configs(
    grouping: int = 0, *, is_1d1d: bool, with_clusters: bool = False
) -> tuple[TileConfig, ...]:
    """Returns the configs that a product may get.

    grouping: 0, GROUPED_ROWS or GROUPED_CONTRACTION. with_clusters: for a product that is not
    grouped, CLUSTER_CONFIGS too, which no product gets.
    """
    common = GROUPED_CONFIGS[grouping] if grouping else CONFIGS
    tall = (_TALL_1D1D,) if is_1d1d else ()
    clusters = CLUSTER_CONFIGS if with_clusters and not grouping else ()
    return (*common, *tall, *clusters)
