"""The lists of TileConfigs, by what a product is. _tuning/choose.py says which one a shape gets."""

from __future__ import annotations

import dataclasses

from jax_fp8gemm._tuning.tile import TileConfig

# Tiles for few rows stream rhs: they have many stages, several batches in the queue, and few
# columns, so that there are tiles for all SMs. Of their 64 rows, those that lhs does not have are
# not loaded, and not stored from registers.
TILE_64X16 = TileConfig(
    block_m=64, block_n=16, sub_n=16, num_consumers=1, num_accums=4, num_stages=20, num_slabs=0
)
TILE_64X32 = TileConfig(
    block_m=64, block_n=32, sub_n=32, num_consumers=1, num_accums=4, num_stages=17, num_slabs=0
)
TILE_64X56 = TileConfig(
    block_m=64, block_n=56, sub_n=56, num_consumers=1, num_accums=2, num_stages=14, num_slabs=0
)
TILE_64X64 = TileConfig(
    block_m=64, block_n=64, sub_n=64, num_consumers=1, num_accums=2, num_stages=13, num_slabs=0
)
TILE_64X128 = TileConfig(
    block_m=64, block_n=128, sub_n=64, num_consumers=1, num_accums=2, num_stages=8, num_slabs=0
)

TILE_128X64 = TileConfig(
    block_m=128, block_n=64, sub_n=64, num_consumers=2, num_accums=2, num_stages=8, num_slabs=0
)
TILE_128X128_SUB64 = TileConfig(
    block_m=128, block_n=128, sub_n=64, num_consumers=2, num_accums=2, num_stages=5, num_slabs=2
)
TILE_128X128 = TileConfig(
    block_m=128, block_n=128, sub_n=128, num_consumers=2, num_accums=1, num_stages=5, num_slabs=2
)
TILE_128X256 = TileConfig(
    block_m=128, block_n=256, sub_n=128, num_consumers=2, num_accums=1, num_stages=3, num_slabs=4
)
TILE_192X128 = TileConfig(
    block_m=192, block_n=128, sub_n=128, num_consumers=3, num_accums=1, num_stages=4, num_slabs=2
)
# A consumer of 128 rows reads the scales of its columns once for both halves. Two accumulators
# leave registers for 96 columns. For 1d1d alone.
TILE_256X96 = TileConfig(
    block_m=256, block_n=96, sub_n=96, num_consumers=2, num_accums=2, num_stages=4, num_slabs=2
)
# A table of groups takes shared memory, here that of one stage.
TILE_64X64_GROUPED = dataclasses.replace(TILE_64X64, num_stages=12)

CONFIGS: tuple[TileConfig, ...] = (
    TILE_64X16,
    TILE_64X32,
    TILE_64X56,
    TILE_64X64,
    TILE_64X128,
    TILE_128X128_SUB64,
    TILE_128X128,
    TILE_128X256,
    TILE_192X128,
)
CONFIGS_1D1D: tuple[TileConfig, ...] = (TILE_128X64, TILE_256X96)
# For 1d2d products: widths that fill the last round of more shapes, clusters that read rhs, or lhs,
# from the L2 once for two or four CTAs, and slabs. With about 40 rows or more, a tile is stored
# faster by TMA than from registers.
TILE_64X48 = TileConfig(
    block_m=64, block_n=48, sub_n=48, num_consumers=1, num_accums=4, num_stages=15, num_slabs=0
)
TILE_64X80 = TileConfig(
    block_m=64, block_n=80, sub_n=80, num_consumers=1, num_accums=2, num_stages=12, num_slabs=0
)
TILE_64X96 = TileConfig(
    block_m=64, block_n=96, sub_n=96, num_consumers=1, num_accums=2, num_stages=11, num_slabs=0
)
TILE_64X64_SLAB = dataclasses.replace(TILE_64X64, num_slabs=1)
TILE_64X80_SLAB = dataclasses.replace(TILE_64X80, num_stages=11, num_slabs=1)
TILE_64X96_SLAB = dataclasses.replace(TILE_64X96, num_stages=10, num_slabs=1)
TILE_64X112 = TileConfig(
    block_m=64, block_n=112, sub_n=112, num_consumers=1, num_accums=2, num_stages=9, num_slabs=1
)
TILE_64X128_SLAB = dataclasses.replace(TILE_64X128, num_slabs=1)
TILE_64X160 = TileConfig(
    block_m=64, block_n=160, sub_n=80, num_consumers=1, num_accums=2, num_stages=7, num_slabs=1
)
TILE_128X64_SLAB = dataclasses.replace(TILE_128X64, num_slabs=1)
TILE_128X48 = TileConfig(
    block_m=128, block_n=48, sub_n=48, num_consumers=2, num_accums=2, num_stages=9, num_slabs=1
)
TILE_128X96 = TileConfig(
    block_m=128, block_n=96, sub_n=96, num_consumers=2, num_accums=2, num_stages=6, num_slabs=3
)
TILE_128X112 = TileConfig(
    block_m=128, block_n=112, sub_n=112, num_consumers=2, num_accums=2, num_stages=6, num_slabs=1
)
TILE_128X144 = TileConfig(
    block_m=128, block_n=144, sub_n=144, num_consumers=2, num_accums=1, num_stages=5, num_slabs=1
)
TILE_128X160 = TileConfig(
    block_m=128, block_n=160, sub_n=80, num_consumers=2, num_accums=2, num_stages=5, num_slabs=1
)
TILE_128X176 = TileConfig(
    block_m=128, block_n=176, sub_n=88, num_consumers=2, num_accums=2, num_stages=4, num_slabs=1
)
TILE_128X192 = TileConfig(
    block_m=128, block_n=192, sub_n=96, num_consumers=2, num_accums=2, num_stages=4, num_slabs=3
)
TILE_128X208 = TileConfig(
    block_m=128, block_n=208, sub_n=104, num_consumers=2, num_accums=2, num_stages=4, num_slabs=1
)
TILE_128X224 = TileConfig(
    block_m=128, block_n=224, sub_n=112, num_consumers=2, num_accums=1, num_stages=4, num_slabs=1
)
TILE_192X64 = TileConfig(
    block_m=192, block_n=64, sub_n=64, num_consumers=3, num_accums=1, num_stages=6, num_slabs=1
)
TILE_192X96 = TileConfig(
    block_m=192, block_n=96, sub_n=96, num_consumers=3, num_accums=1, num_stages=5, num_slabs=1
)
CONFIGS_1D2D: tuple[TileConfig, ...] = (
    TILE_64X48,
    TILE_64X80,
    TILE_64X96,
    TILE_64X64_SLAB,
    TILE_64X80_SLAB,
    TILE_64X96_SLAB,
    TILE_64X112,
    TILE_64X128_SLAB,
    TILE_64X160,
    TILE_128X64_SLAB,
    TILE_128X96,
    TILE_128X112,
    TILE_128X144,
    TILE_128X160,
    TILE_128X176,
    TILE_128X192,
    TILE_128X208,
    TILE_128X224,
    TILE_192X96,
    *(
        dataclasses.replace(config, cluster_m=2)
        for config in (
            TILE_128X96,
            TILE_128X128,
            TILE_128X192,
            TILE_128X224,
            TILE_128X256,
            TILE_192X128,
        )
    ),
    *(dataclasses.replace(config, cluster_m=4) for config in (TILE_128X192, TILE_128X256)),
    *(
        dataclasses.replace(config, cluster_n=4)
        for config in (
            dataclasses.replace(TILE_64X32, num_stages=18),  # without groups one more has room
            TILE_64X64_SLAB,
            TILE_64X96_SLAB,
            TILE_128X48,
            TILE_128X64_SLAB,
            TILE_128X96,
            TILE_128X112,
            TILE_128X128,
            TILE_128X160,
            TILE_192X64,
            TILE_192X128,
        )
    ),
)
# These are slower on most shapes (docs/experiments/gemm-memory.md), so no product gets them but
# for those of CONFIGS_1D2D. Tests and bench run them.
CLUSTER_CONFIGS = (
    dataclasses.replace(TILE_128X256, cluster_m=2),
    dataclasses.replace(TILE_192X128, cluster_n=2),
)

# The attribute `grouping`: what the groups of a product cut.
GROUPED_ROWS, GROUPED_CONTRACTION = 1, 2

# Grouped kernels have no clusters, and a table of groups in shared memory. Two accumulators gain
# nothing there in 128x192.
GROUPED_CONFIGS: dict[int, tuple[TileConfig, ...]] = {
    GROUPED_ROWS: (
        TILE_64X32,
        TILE_64X64_GROUPED,
        dataclasses.replace(TILE_64X80, num_stages=11),
        dataclasses.replace(TILE_64X96, num_stages=10),
        dataclasses.replace(TILE_64X112, num_stages=8),
        TILE_64X128,
        TILE_64X160,
        TILE_128X64,
        dataclasses.replace(TILE_128X96, num_slabs=1),
        TILE_128X128_SUB64,
        TILE_128X144,
        dataclasses.replace(TILE_128X192, sub_n=192, num_accums=1),
        TILE_128X256,
        TILE_192X128,
    ),
    GROUPED_CONTRACTION: (TILE_128X128, TILE_128X256, TILE_192X128),
}

# Products whose result is stored transposed are weight gradients, of which few are small.
TRANSPOSED_CONFIGS = (TILE_64X64_GROUPED, TILE_128X128, TILE_128X256, TILE_192X128)


def configs(
    grouping: int = 0, *, is_1d1d: bool, transpose_out: bool = False, with_clusters: bool = False
) -> tuple[TileConfig, ...]:
    """Returns the configs that a product may get.

    grouping: 0, GROUPED_ROWS or GROUPED_CONTRACTION. with_clusters: for a product that is not
    grouped, CLUSTER_CONFIGS too, which no product gets.
    """
    if transpose_out:
        return TRANSPOSED_CONFIGS
    if grouping:
        return (*GROUPED_CONFIGS[grouping], *((TILE_256X96,) if is_1d1d else ()))
    listed = (*CONFIGS, *(CONFIGS_1D1D if is_1d1d else CONFIGS_1D2D))
    clusters = CLUSTER_CONFIGS if with_clusters else ()
    return (*listed, *(config for config in clusters if config not in listed))
