"""Sizes of groups, drawn once and for all, and the work of grouped products."""

import numpy as np

from benchmarks.problem import GroupedShape, Work

_SPREAD = 0.3  # of a group's size around the expected one, as DeepGEMM's tests draw it
_SEED = 14814
_BLOCK = 128


def draw_sizes(groups: int, expected: int, multiple: int = 1) -> np.ndarray:
    """int32 (groups,): int(expected * U(0.7, 1.3)), rounded up to a multiple; always the same."""
    factors = np.random.default_rng(_SEED).uniform(1 - _SPREAD, 1 + _SPREAD, groups)
    sizes = np.maximum(1, (expected * factors).astype(np.int32))
    return -(-sizes // multiple) * multiple


def sizes_of(shape: GroupedShape) -> np.ndarray:
    """int32 sizes of the groups of a shape, the empty ones included."""
    if shape.sizes == "zipf":
        sizes = _zipf_sizes(shape.groups, shape.groups * shape.m)
    else:
        sizes = draw_sizes(shape.groups, shape.m)
    if not shape.empty:
        return sizes
    with_empty = np.zeros(shape.groups + shape.empty, np.int32)
    with_empty[np.linspace(0, len(with_empty) - 1, shape.groups).astype(int)] = sizes
    return with_empty


def _zipf_sizes(groups: int, total: int) -> np.ndarray:
    """The i-th group of a random order has a share of `total` in proportion to 1 / i."""
    shares = 1 / np.arange(1, groups + 1)
    ends = np.rint(np.cumsum(shares) / shares.sum() * total)
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    return np.random.default_rng(_SEED).permutation(sizes)


def draw_shares(groups: int, total: int) -> np.ndarray:
    """int32 (groups,) with that sum, in proportion to U(0.3, 1.7); always the same."""
    weights = np.random.default_rng(_SEED).uniform(0.3, 1.7, groups)
    ends = np.rint(np.cumsum(weights) / weights.sum() * total)
    return np.diff(ends, prepend=0).astype(np.int32)


def expected_rows(mean: int) -> int:
    """What a call of the masked form is told of groups with so many rows on average.

    DeepGEMM's own benchmark tells its kernel this much.
    """
    return int(1.2 * mean)


def masked_rows(expected: int) -> int:
    """max_m of the masked form: 1024, or 4096 and so on where groups may have more rows."""
    max_m = 1024
    while max_m < (1 + _SPREAD) * expected:
        max_m *= 4
    return max_m


def ragged_work(shape: GroupedShape, rows: int, full_groups: int | None = None) -> Work:
    """`rows` valid rows in all; the matrix of each group that has some is read; bf16 results."""
    groups = shape.groups if full_groups is None else full_groups
    n, k, num_blocks = shape.n or 0, shape.k, _num_blocks(shape.k)
    values = (rows + groups * n) * k
    scales = (rows + groups * _num_blocks(n)) * num_blocks
    return Work(2 * rows * n * k, values + 4 * scales + 2 * rows * n)


def wgrad_work(shape: GroupedShape, tokens: int, accumulate: bool) -> Work:
    """`tokens` contracted in all; f32 results of every group, read before if accumulated."""
    m, n = shape.m, shape.n or 0
    values = (m + n) * tokens
    scales = (m + n) * _num_blocks(tokens)
    out = 4 * shape.groups * m * n * (2 if accumulate else 1)
    return Work(2 * m * n * tokens, values + 4 * scales + out)


def _num_blocks(extent: int) -> int:
    return -(-extent // _BLOCK)
