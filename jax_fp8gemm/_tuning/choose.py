"""choose: which TileConfig a product gets.

The choice is a pure function of static shapes and the number of multiprocessors. It is made when a
program is lowered, and baked into the executable. A table of measured overrides comes first; other
shapes get the config that is predicted to be fastest: of dense 1d2d products by
_tuning/dense_cost.py, of groups of rows by _tuning/grouped_cost.py, of weight gradients by
_tuning/cost.py.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from jax_fp8gemm._runtime import hopper
from jax_fp8gemm._runtime.forced import Forced
from jax_fp8gemm._tuning import tile_config
from jax_fp8gemm._tuning.cost import grouped_time_us, time_us
from jax_fp8gemm._tuning.dense_cost import dense_time_us
from jax_fp8gemm._tuning.grouped_cost import grouped_rows_time_us, is_for_rows
from jax_fp8gemm._tuning.partial_sums import partial_sums_config, partial_sums_time_us
from jax_fp8gemm._tuning.split_k import split_k_configs, split_k_time_us
from jax_fp8gemm._tuning.tile import TileConfig
from jax_fp8gemm._tuning.tile_config import GROUPED_CONTRACTION, GROUPED_ROWS, configs

# (m, n, k, is_1d1d) -> config. On these shapes the model's choice was slower on an H200:
# docs/experiments/gemm-memory.md. Another number of multiprocessors has no overrides.
_OVERRIDES: dict[tuple[int, int, int, bool], TileConfig] = {
    (128, 32768, 512, False): tile_config.TILE_128X128_SUB64,  # 10.5 us, 128x256 11.8
}

override: Forced[TileConfig] = Forced()  # the config of every product within a context

# What an extent counts as that a program for all sizes leaves open: jax.export.symbolic_shape. Any
# config is right for any extent, and one for many rows loses least where there are many.
_OPEN_EXTENT = 4096


def choose(
    m: int,
    n: int,
    k: int,
    num_groups: int | None = None,
    *,
    is_1d1d: bool,
    out_f32: bool,
    accumulate: bool,
    transpose_out: bool = False,
    num_sms: int = hopper.NUM_SMS,
    num_parts: int = 1,
) -> TileConfig:
    """Returns the config for out (m, n) = lhs (m, k) x rhs (n, k), of extents >= 1.

    num_groups: None without groups. A grouped product gets its config as if all groups were about
      as large. 1d2d, groups of rows: m counts the rows of all groups; n and k are those of one
      group. 1d1d or transpose_out, groups of the contraction: k counts the tokens of all groups; m
      and n are those of one.
    transpose_out: whether the result is stored as (n, m).
    num_parts: how many parts of k are added up by themselves (_data/split_k.py).
    """
    if override.value is not None:
        return override.value
    if num_parts > 1:
        return partial_sums_config(m, num_parts)
    # A program that leaves k open may run with more of it than the split configs take.
    can_split = not (is_1d1d or transpose_out or accumulate) and isinstance(k, int)
    m, n, k = map(_known, (m, n, k))
    how = is_1d1d, transpose_out, out_bytes(out_f32, accumulate), num_sms
    product = Product(m, n, k, num_groups, *how)
    return _choose(product, can_split) if num_groups is None else _choose_grouped(product)


class Product(NamedTuple):
    """What a config is chosen for: extents and flags as in `choose`.

    out_bytes: moved for each element of the result.
    """

    m: int
    n: int
    k: int
    num_groups: int | None
    is_1d1d: bool
    transpose_out: bool
    out_bytes: int
    num_sms: int

    @property
    def is_weight_gradient(self) -> bool:
        """Whether its cost model is that of weight gradients; of groups, whether they cut k."""
        return self.is_1d1d or self.transpose_out


def out_bytes(out_f32: bool, accumulate: bool) -> int:
    """Returns the bytes that are moved for each element of the result."""
    return 4 + 4 * accumulate if out_f32 else 2


def _known(extent: object) -> int:
    """Returns the extent, or what counts for it if it is symbolic."""
    return extent if isinstance(extent, int) else _OPEN_EXTENT


@functools.lru_cache(maxsize=4096)
def _choose(product: Product, can_split: bool) -> TileConfig:
    m, n, k, _, is_1d1d, transpose_out, _, num_sms = product
    is_listed = num_sms == hopper.NUM_SMS and not transpose_out
    measured = _OVERRIDES.get((m, n, k, is_1d1d)) if is_listed else None
    if measured is not None:
        return measured
    candidates = configs(is_1d1d=is_1d1d, transpose_out=transpose_out)
    most_rows = math.ceil(m / 64) * 64
    candidates = [c for c in candidates if c.block_m <= most_rows]
    if can_split:
        candidates += [c for c in split_k_configs(m, k) if c.cluster_k <= num_sms]
    return min(candidates, key=lambda c: predicted_us(c, product))


@functools.lru_cache(maxsize=4096)
def _choose_grouped(product: Product) -> TileConfig:
    grouping = GROUPED_CONTRACTION if product.is_weight_gradient else GROUPED_ROWS
    _, _, _, num_groups, is_1d1d, transpose_out, *_ = product
    candidates = configs(grouping, is_1d1d=is_1d1d, transpose_out=transpose_out)
    if grouping == GROUPED_ROWS:
        assert num_groups
        of_groups = product.m / num_groups, product.n, num_groups, product.num_sms
        candidates = [c for c in candidates if is_for_rows(c, *of_groups)]
    return min(candidates, key=lambda c: predicted_us(c, product))


def predicted_us(c: TileConfig, product: Product) -> float:
    """Returns the predicted time of a product."""
    m, n, k, num_groups, is_1d1d, _, num_bytes, num_sms = product
    if num_groups is not None:
        if product.is_weight_gradient:
            return grouped_time_us(c, m, n, k, num_groups, is_1d1d, num_bytes, num_sms)
        return grouped_rows_time_us(c, m, n, k, num_groups, num_bytes, num_sms)
    if product.is_weight_gradient:
        return time_us(c, m, n, k, is_1d1d, num_bytes, num_sms)
    if c.partial_sums:
        return partial_sums_time_us(c, m, n, k, num_bytes)
    if c.cluster_k > 1:
        return split_k_time_us(c, m, n, k, num_bytes, num_sms)
    return dense_time_us(c, m, n, k, num_bytes, num_sms)
