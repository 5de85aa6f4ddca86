"""Groups of rows: what group_sizes means, to the row, for every grouped op.

Group i is the next group_sizes[i] rows after those of the groups before it. The first group starts
after `first_row` rows. Bad sizes are harmless: a negative size counts as 0, and a group that would
end past the last row ends there. All of it is computed on the device; the host never reads a size.

A contraction over the rows of each group reads them from ragged columns: an array whose columns are
tokens. There every group starts at a multiple of 128, so that no scale block spans two groups, and
zeros complete its last block.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8gemm._data import arrays, checks, formats

_BLOCK = formats.SCALE_BLOCK
MAX_GROUPS = 1024
_INT32_MAX = 2**31 - 1


class Groups(NamedTuple):
    """The groups of the rows of an array.

    Attributes:
      sizes: (g,) int32, the number of rows of each group.
      first_row: (1,) int32, the row at which the first group starts.
    """

    sizes: jax.Array
    first_row: jax.Array

    @classmethod
    def of_sizes(cls, sizes: jax.Array) -> Groups:
        """Returns groups of these sizes, the first of which starts at row 0."""
        return cls(sizes, jnp.zeros((1,), jnp.int32))


def check_group_sizes(
    op: str,
    group_sizes: arrays.Typed,
    num_groups: int | None = None,
    *,
    error: checks.Error = ValueError,
) -> None:
    """Raises unless group_sizes are integers (g,), with g = num_groups if that is given.

    error: the class of the error for a wrong shape.
    """
    checks.check_integers(op, "group_sizes", group_sizes)
    checks.check_ndim(op, "group_sizes", group_sizes, 1, "(g,)", error=error)
    (g,) = group_sizes.shape
    if num_groups is not None and g != num_groups:
        raise error(
            f"{op}: group_sizes must have one size for each of the {num_groups} groups of rhs; "
            f"got group_sizes {checks.short_type(group_sizes)}"
        )
    if not 1 <= g <= MAX_GROUPS:
        raise ValueError(
            f"{op}: group_sizes must have 1 to {MAX_GROUPS} groups; "
            f"got group_sizes {checks.short_type(group_sizes)}"
        )


def check_rows(op: str, x: object, m: int, group_sizes: arrays.Typed) -> None:
    """Raises ValueError unless int32 can number m rows of `x`, and their ragged columns."""
    got = f"{checks.short_type(x)}, group_sizes {checks.short_type(group_sizes)}"
    checks.check_count(op, "m + 127 g", m + (_BLOCK - 1) * group_sizes.shape[0], got)


def sizes_as_int32(group_sizes: jax.Array | np.ndarray) -> jax.Array:
    """Returns integers as int32 that mean the same sizes of groups.

    Those of int32 stay as they are. Whatever reads sizes counts a negative one as 0, and to do that
    here would be a kernel of its own, 2 us for each product.
    """
    if group_sizes.dtype == jnp.int32:
        return jnp.asarray(group_sizes)
    return as_int32(group_sizes)


def as_int32(x: jax.Array | np.ndarray, lowest: int = 0) -> jax.Array:
    """Returns integers as int32 >= `lowest`, saturated instead of wrapped."""
    info = jnp.iinfo(x.dtype)
    bounds = max(int(info.min), lowest), min(int(info.max), _INT32_MAX)
    if isinstance(x, np.ndarray):  # int64 that jnp.asarray would wrap
        return jnp.asarray(np.clip(x, *bounds).astype(np.int32))
    return jnp.clip(x, *bounds).astype(jnp.int32)


def row_ranges(group_sizes: jax.Array, first_row: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first row of each group and the row after its last, both int32 (g,) in 0..m."""
    # NOTE: clamped to m at every step, in uint32: sums of sizes would overflow otherwise.
    limit = jnp.uint32(m)
    first = jnp.clip(first_row.reshape(()), 0, m).astype(jnp.uint32)
    sizes = jnp.clip(group_sizes, 0, m).astype(jnp.uint32)

    def saturating_add(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.minimum(a + b, limit)

    ends = saturating_add(first, jax.lax.associative_scan(saturating_add, sizes))
    ends = ends.astype(jnp.int32)
    return jnp.concatenate([first.astype(jnp.int32)[None], ends[:-1]]), ends


def group_of_rows(group_sizes: jax.Array, first_row: jax.Array, m: int) -> jax.Array:
    """Returns the group of each of m rows, int32 (m,); g for a row of no group."""
    (g,) = group_sizes.shape
    starts, ends = row_ranges(group_sizes, first_row, m)
    rows = jnp.arange(m, dtype=jnp.int32)
    return jnp.where(rows < starts[0], g, count_up_to(ends, rows))


def count_up_to(ends: jax.Array, x: jax.Array) -> jax.Array:
    """Returns how many of `ends` are at most each x, int32: searchsorted from the right.

    jnp.searchsorted fails in a shard_map over some of the mesh axes, with check_vma.
    """
    return jnp.sum(ends[None] <= x[:, None], axis=1, dtype=jnp.int32)


def ragged_extent(m: int, num_groups: int) -> int:
    """Returns the number of ragged columns that hold m tokens in groups of any sizes."""
    return (m + (_BLOCK - 1) * num_groups) // _BLOCK * _BLOCK


def column_starts(starts: jax.Array, ends: jax.Array) -> jax.Array:
    """Returns the first ragged column of each group, int32 (g,), given its row range."""
    blocks = (ends - starts + _BLOCK - 1) // _BLOCK
    return (jnp.cumsum(blocks) - blocks) * _BLOCK


def rows_of_columns(group_sizes: jax.Array, first_row: jax.Array, m: int) -> jax.Array:
    """Returns the row that each ragged column holds, int32 (ragged_extent,); m for zeros."""
    (g,) = group_sizes.shape
    starts, ends = row_ranges(group_sizes, first_row, m)
    offsets = column_starts(starts, ends)
    columns = jnp.arange(ragged_extent(m, g), dtype=jnp.int32)
    # The last group that starts at or before the column; empty groups hold no column.
    group = count_up_to(offsets, columns) - 1
    rows = starts[group] + columns - offsets[group]
    return jnp.where(rows < ends[group], rows, m)
