"""Tile configs to time, more than a call can choose: which of them pay is read from the times."""

from collections.abc import Sequence

from jax_fp8gemm._tuning.split_k import split_k_configs
from jax_fp8gemm._tuning.tile import TileConfig
from jax_fp8gemm._tuning.tile_config import GROUPED_CONFIGS, GROUPED_ROWS, configs

_SMEM_BYTES = 232448  # of a CTA
_GROUPS_BYTES = 12416  # a table of groups, in shared memory
_LISTED = configs(is_1d1d=False)
_LISTED_GROUPED = GROUPED_CONFIGS[GROUPED_ROWS]
_WIDTHS = (16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128)
# rows, columns, columns of a wgmma, consumers, accumulators, slabs, cluster along m and n.
_HALF = """
64 56 56 1 2 1 1 1    64 64 64 1 2 1 1 1    64 72 72 1 2 1 1 1    64 80 80 1 2 1 1 1
64 96 96 1 2 1 1 1    64 112 112 1 2 1 1 1  64 128 64 1 2 1 1 1   64 160 80 1 2 1 1 1
64 144 72 1 2 1 1 1   64 192 96 1 2 1 1 1   64 48 48 1 4 0 1 4    64 80 80 1 2 1 1 4
64 112 112 1 2 1 1 4  64 128 64 1 2 1 1 4
"""
_MIDDLE = """
64 48 48 1 4 1 1 1    64 192 96 1 2 1 2 1   128 64 64 2 2 1 2 1   128 72 72 2 2 1 1 1
64 64 64 1 2 1 2 1    64 96 96 1 2 1 2 1    64 64 64 1 2 1 4 1    64 96 96 1 2 1 4 1
128 80 80 2 2 1 1 1   128 88 88 2 2 1 1 1   128 96 96 2 2 1 1 1   128 104 104 2 2 1 1 1
128 120 120 2 2 1 1 1 192 80 80 3 2 1 1 1   128 80 80 2 2 1 1 4   128 112 112 2 2 1 2 1
"""
_LARGE = """
128 128 128 2 1 1 1 1 128 160 160 2 1 1 1 1 128 192 96 2 2 1 1 1  128 192 192 2 1 3 1 1
128 208 104 2 1 1 1 1 192 144 72 3 1 1 1 1  192 160 80 3 1 1 1 1
256 112 112 2 1 1 1 1 256 128 128 2 1 4 1 1 128 144 144 2 1 1 2 1 128 160 80 2 2 1 2 1
128 176 88 2 2 1 2 1  128 192 192 2 1 3 2 1 128 208 104 2 1 1 2 1 192 128 128 3 1 2 1 2
192 96 96 3 1 1 1 2   128 128 128 2 1 2 4 1 128 160 80 2 2 1 4 1  128 160 160 2 1 1 1 4
128 192 96 2 2 3 1 4
"""
# Of groups of rows. Clusters are 1x1.
_HALF_GROUPED = """
64 16 16 1 4 0    64 48 48 1 4 0    64 56 56 1 2 0    64 72 72 1 2 0    64 144 72 1 2 1
64 192 96 1 2 1
"""
_MIDDLE_GROUPED = """
128 64 64 2 2 1   128 80 80 2 2 1   128 112 112 2 2 1 192 64 64 3 2 1   192 80 80 3 2 1
"""
_LARGE_GROUPED = """
128 128 128 2 1 2 128 160 160 2 1 1 128 176 88 2 1 1  128 208 104 2 1 1 128 224 112 2 1 1
128 240 120 2 1 1 192 96 96 3 1 1   192 112 112 3 1 1 192 144 72 3 1 1  192 160 80 3 1 1
192 176 88 3 1 1
"""


def candidates(m: int, k: int) -> Sequence[TileConfig]:
    """The configs to time for m rows of lhs and a contraction of k."""
    if m <= 64:
        few = [_deepest(64, n, n if n < 128 else 64, 1, 4 if n <= 48 else 2, 0) for n in _WIDTHS]
        listed = (c for c in _LISTED if c.block_m <= 128)
        return _unique((*few, *listed, *_parse(_HALF), *split_k_configs(m, k)))
    if m <= 192:
        return _unique((*_LISTED, *_parse(_HALF + _MIDDLE)))
    if m <= 1024:
        return _unique((*_LISTED, *_parse(_HALF + _MIDDLE + _LARGE)))
    return _unique((*_LISTED, *_parse(_LARGE)))


def all_candidates() -> Sequence[TileConfig]:
    """Every config that some m and k have."""
    return _unique(c for m in (1, 16, 192, 512, 4096) for c in candidates(m, 2048))


def grouped_candidates(rows: int) -> Sequence[TileConfig]:
    """The configs to time for groups of so many rows on average."""
    half, middle, large = map(_parse_grouped, (_HALF_GROUPED, _MIDDLE_GROUPED, _LARGE_GROUPED))
    if rows <= 32:
        return _unique((*_LISTED_GROUPED, *half))
    return _unique((*_LISTED_GROUPED, *half, *middle, *large))


def all_grouped_candidates() -> Sequence[TileConfig]:
    """Every config that groups of some rows have."""
    return grouped_candidates(64)


def _parse(table: str) -> list[TileConfig]:
    numbers = list(map(int, table.split()))
    return [_of(numbers[i : i + 8]) for i in range(0, len(numbers), 8)]


def _of(fields: Sequence[int]) -> TileConfig:
    *tile, cluster_m, cluster_n = fields
    return _deepest(*tile, cluster_m=cluster_m, cluster_n=cluster_n)


def _parse_grouped(table: str) -> list[TileConfig]:
    numbers = list(map(int, table.split()))
    rows = [numbers[i : i + 6] for i in range(0, len(numbers), 6)]
    return [_deepest(*row, smem_bytes=_SMEM_BYTES - _GROUPS_BYTES) for row in rows]


def _deepest(
    block_m: int,
    block_n: int,
    sub_n: int,
    consumers: int,
    accums: int,
    slabs: int,
    smem_bytes: int = _SMEM_BYTES,
    cluster_m: int = 1,
    cluster_n: int = 1,
) -> TileConfig:
    """The config with as many stages as shared memory holds beside its slabs."""
    stage = (block_m + block_n) * 128 + (block_m + 32) * 4 + 4 * 4 + 16
    slab_bytes = 128 * block_n if block_n % 32 else 8192  # of bf16
    fixed = consumers * max(16, slabs * slab_bytes) + 1024
    stages = min(24, (smem_bytes - fixed) // stage)
    tile = block_m, block_n, sub_n
    return TileConfig(*tile, consumers, accums, stages, slabs, cluster_m, cluster_n)


def _unique(configs) -> list[TileConfig]:
    return list(dict.fromkeys(configs))
