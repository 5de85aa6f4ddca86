"""Rows of the masked form of a grouped product: how many to expect, how to clear unused ones."""

import math

# Values of `clears_unused` in ffi/gemm/grouped_gemm.h.
LEFT, IN_KERNEL, BY_FILL = 0, 1, 2

# The tensor cores work on groups of as many rows for longer than the memory does. So the kernel can
# store zeros meanwhile. With fewer rows it waits for the memory, and stores beside its loads cost
# more than a fill before them (docs/experiments/grouped.md).
_MIN_ROWS_TO_CLEAR_IN_KERNEL = 160


def rows_of_tiles(*rows: int, expected_rows: int | None) -> int:
    """Returns the rows of all groups that tiles are chosen for, of lhs (*rows, k)."""
    if len(rows) == 1 or expected_rows is None:
        return math.prod(rows)
    g, max_m = rows
    return g * min(expected_rows, max_m)


def how_to_clear(*rows: int, expected_rows: int | None) -> int:
    """Returns how the rows of no group become zeros: IN_KERNEL or BY_FILL."""
    expected = rows_of_tiles(*rows, expected_rows=expected_rows)
    if len(rows) == 1 or expected >= rows[0] * _MIN_ROWS_TO_CLEAR_IN_KERNEL:
        return IN_KERNEL
    return BY_FILL
