"""split_k: the parts in which a dense product of few rows may add up its contraction.

With split_k, a dense 1d2d product of up to 64 rows, few columns and a long contraction divides its
k-blocks into parts. All parts have the same length, except that the last parts may be shorter.
_primitives/gemm.py defines the f32 sum of a part, as the product over its k-blocks alone. The
result is ((sum 0 + sum 1) + sum 2) and so on in f32, rounded to the dtype of the result.

The number of parts depends on n and k alone. So no other row changes a bit of a row, as long as
there are at most 64 rows.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MOST_ROWS = 64


class _Division(NamedTuple):
    num_parts: int
    most_columns: int  # of the result
    least_blocks: int  # of k


# 14 clusters of eight CTAs run at a time on an H200, and 16 of six do; each has 64 columns. With
# fewer k-blocks other tiles are as fast (docs/experiments/split-k.md).
_DIVISIONS = _Division(8, 14 * 64, 28), _Division(6, 16 * 64, 40)
# With more, the scales of a part may have no room (MostSplitK in ffi/gemm/gemm_config.cc).
_MOST_BLOCKS = 2048


def count_parts(m: Any, n: Any, num_blocks: Any) -> int:
    """Returns how many parts a product has with split_k: 1 where it is not divided."""
    if not all(isinstance(extent, int) for extent in (m, n, num_blocks)):
        return 1  # a program for all sizes
    if m > _MOST_ROWS or num_blocks > _MOST_BLOCKS:
        return 1
    for division in _DIVISIONS:
        if n <= division.most_columns:
            return division.num_parts if num_blocks >= division.least_blocks else 1
    return 1


def parts_of(num_blocks: Any, num_parts: int) -> list[tuple[Any, Any]]:
    """Returns the first k-block of each part, and the one behind its last. They may be equal."""
    if num_parts == 1:
        return [(0, num_blocks)]
    length = -(-num_blocks // num_parts)
    limits = [min(i * length, num_blocks) for i in range(num_parts + 1)]
    return list(zip(limits[:-1], limits[1:], strict=True))


def add_parts(
    add_up: Callable[[Any, Any], jax.Array],
    add: Callable[[jax.Array, jax.Array], jax.Array],
    num_blocks: Any,
    num_parts: int,
) -> jax.Array:
    """Returns the sums add_up(first, behind) of all parts, added in order. Limits are int32."""
    first, *others = parts_of(num_blocks, num_parts)
    total = add_up(_int32(first[0]), _int32(first[1]))
    if not others:
        return total

    def add_part(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
        return add(total, add_up(part[0], part[1])), None

    # One program for all parts but the first.
    return lax.scan(add_part, total, jnp.asarray(np.array(others, np.int32)))[0]


def _int32(extent: Any) -> Any:
    return np.int32(extent) if isinstance(extent, int) else jnp.asarray(extent, jnp.int32)
