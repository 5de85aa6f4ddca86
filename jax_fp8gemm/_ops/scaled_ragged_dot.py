"""scaled_ragged_dot: multiplies groups of rows by their matrices (_primitives/grouped_gemm.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks, groups
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array, without_twin
from jax_fp8gemm._ops.scaled_checks import check_block, check_result
from jax_fp8gemm._primitives.grouped_gemm import UnusedRows, grouped_gemm

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_UNUSED_ROWS = get_args(UnusedRows)


@naming_devices
def scaled_ragged_dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: Int[Array, " g"],
    *,
    unused_rows: UnusedRows = "zero",
    expected_rows: int | None = None,
    out_dtype: Any = jnp.bfloat16,
    implementation: Implementation = None,
) -> Float[Array, "m n"] | Float[Array, "g max_m n"]:
    """Multiplies each group of rows of lhs by the transpose of its own rhs[i].

    It is not differentiable; jax_fp8gemm.ragged_dot is. The scaling is that of the DeepSeek-V3
    report, section 3.3.2.

    Args:
      lhs: (m, k) with scale blocks (1, 128), rows sorted by group. Or (g, max_m, k), the masked
        form for decoding: group i is the first group_sizes[i] rows of lhs[i].
      rhs: (g, n, k) with scale blocks (128, 128).
      group_sizes: (g,) integers, which stay on the device. A negative size counts as 0. A group
        that would end past row m, or max_m, ends there.
      unused_rows: what the rows of no group hold in the result. "zero": zeros. "undefined", of the
        masked form alone: anything, also NaN and other values in each run. Nothing is then written
        there, which saves g * max_m * n elements of memory traffic. For callers that never read
        these rows.
      expected_rows: of the masked form alone, the rows that a group has on average. The kernel's
        tiles are chosen for it, and whether the kernel stores zeros or a fill before it. No bit
        depends on it. None, or more than max_m: max_m. Where few groups have far fewer rows, tiles
        for those occupy more multiprocessors.
      out_dtype: bfloat16 or float32.
      implementation: as for scaled_matmul.
    Returns:
      (m, n) or (g, max_m, n) array of out_dtype. Rows of no group are as `unused_rows` says,
      whatever lhs holds there. Explicit mesh axes cut it like lhs in m and rhs in n. The sum runs
      over the axes that cut k and, with lhs (m, k), over those that cut g.
    Raises:
      ValueError: shapes, blocks or scales disagree, or implementation, unused_rows or
        expected_rows is wrong.
      TypeError: a dtype is wrong.
      RuntimeError: implementation="cuda", and the kernel cannot run.
    """
    op = "scaled_ragged_dot"
    lhs, rhs, group_sizes = map(arrays.as_array, (lhs, rhs, group_sizes))
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        check_scaled_array(op, name, x)
    if lhs.ndim not in (2, 3):
        checks.check_ndim(op, "lhs", lhs, 2, "(m, k) or (g, max_m, k)")
    checks.check_ndim(op, "rhs", rhs, 3, "(g, n, k)")
    for name, x, block in (("lhs", lhs, (1, 128)), ("rhs", rhs, (128, 128))):
        check_block(op, name, x, block)
    checks.check_same_k(op, lhs, lhs.shape[-1], rhs, rhs.shape[2])
    checks.check_array(op, "group_sizes", group_sizes)
    groups.check_group_sizes(op, group_sizes, rhs.shape[0])
    groups.check_rows(op, lhs, lhs.shape[-2], group_sizes)
    if lhs.ndim == 3 and lhs.shape[0] != rhs.shape[0]:
        raise ValueError(
            f"{op}: lhs (g, max_m, k) and rhs (g, n, k) must share g; "
            f"got lhs {checks.short_type(lhs)}, rhs {checks.short_type(rhs)}"
        )
    if not isinstance(unused_rows, str) or unused_rows not in _UNUSED_ROWS:
        names, got = " or ".join(map(repr, _UNUSED_ROWS)), checks.short_repr(unused_rows)
        raise ValueError(f"{op}: unused_rows must be {names}; got {got}")
    if unused_rows == "undefined" and lhs.ndim == 2:
        raise ValueError(
            f"{op}: unused_rows='undefined' must go with lhs (g, max_m, k); "
            f"got lhs {checks.short_type(lhs)}, whose rows of no group are always zero"
        )
    expected_rows = _as_expected_rows(op, expected_rows, lhs)
    shape = *lhs.shape[:-1], rhs.shape[1]
    out_dtype = check_result(op, shape, out_dtype, implementation)
    rows: dict[str, Any] = dict(unused_rows=unused_rows, expected_rows=expected_rows)
    how: dict[str, Any] = dict(implementation=implementation, **rows)
    return grouped_gemm(lhs, without_twin(rhs), *Groups.of_sizes(group_sizes), out_dtype, **how)


def _as_expected_rows(op: str, expected_rows: Any, lhs: ScaledArray) -> int | None:
    """Returns it as an int; raises ValueError where it is wrong."""
    if expected_rows is None:
        return None
    number = checks.as_index(expected_rows)
    if number is None or number < 1:
        raise ValueError(
            f"{op}: expected_rows must be None or an integer of at least 1, known when the call is "
            f"traced; got {checks.short_repr(expected_rows)}"
        )
    if lhs.ndim == 2:
        raise ValueError(
            f"{op}: expected_rows must go with lhs (g, max_m, k); got lhs "
            f"{checks.short_type(lhs)}, whose groups have m / g rows on average"
        )
    return number
