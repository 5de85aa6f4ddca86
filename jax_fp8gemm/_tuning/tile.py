"""TileConfig: how one GEMM is cut into tiles. tile_config.py has the lists of configs.

A config changes the speed of a product, and no bit but with partial_sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict, Unpack

import ml_dtypes
import numpy as np


class Kernel(TypedDict):
    """What a GEMM kernel computes, beside how: operands, result, and the multiprocessors it uses.

    grouping: 0 without groups, GROUPED_ROWS or GROUPED_CONTRACTION. transpose_out: whether the
    result is stored transposed.
    """

    is_1d1d: bool
    lhs_e5m2: bool
    rhs_e5m2: bool
    out_f32: bool
    accumulate: bool
    num_sms: int
    grouping: NotRequired[int]
    transpose_out: NotRequired[bool]


# What the attribute `config` says of h where a product is not gated.
_NO_H = dict.fromkeys(
    ("gated", "h_e5m2", "h_pow2_scale", "activation", "limit", "alpha", "up_offset"), 0
)


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
        registers. Where 32 does not divide block_n, a slab has 64 whole rows of the tile, and f32
        is stored from registers.
      cluster_m, cluster_n: CTAs that share a tile of rhs, or of lhs, by multicast.
      cluster_k: CTAs that divide the k-blocks of a tile. With more than one, sub_n is block_m,
        one consumer multiplies, and the other adds what its cluster multiplied.
      partial_sums: whether each of these CTAs adds up k-blocks of its own, so that the result has
        other bits (_data/split_k.py). The other consumer then multiplies scales.
      quantizes_lhs: whether lhs is bf16, and quantised by the kernel.
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
    cluster_k: int = 1
    partial_sums: bool = dataclasses.field(default=False, kw_only=True)
    quantizes_lhs: bool = dataclasses.field(default=False, kw_only=True)

    def attributes(
        self, h: Mapping[str, Any] = MappingProxyType({}), /, **kernel: Unpack[Kernel]
    ) -> dict[str, np.int32]:
        """Returns the members of the attribute `config` of an FFI call.

        h: what they say of the h of a gated product (_primitives/grouped_gated_gemm.py).
        """
        members: dict[str, Any] = {
            **_NO_H,
            "grouping": 0,
            "transpose_out": False,
            **dataclasses.asdict(self),
            **h,
        }
        members |= kernel
        return {key: np.int32(value) for key, value in members.items()}


def operand_formats(lhs: Any, rhs: Any) -> dict[str, bool]:
    """Returns the formats of FP8 operands, as TileConfig.attributes takes them."""
    is_e5m2 = lambda x: x.dtype == ml_dtypes.float8_e5m2
    return dict(lhs_e5m2=is_e5m2(lhs), rhs_e5m2=is_e5m2(rhs))
