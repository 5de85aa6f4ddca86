"""permute and unpermute: rows to their experts and back.

Forward and backward, rows move by gathers alone, through the permutation or its inverse. The rows
of a token are added in the order of its choices. So no result depends on the order in which threads
finish, as that of a scatter-add does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.groups import as_int32
from jax_fp8gemm._data.kept_rounding import exact_f32, rounded
from jax_fp8gemm._ops.reverse_mode import only_once, reverse_mode, transposable_by_none
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate
from jax_fp8gemm.moe._choices import inverse, sort_choices, take_rows
from jax_fp8gemm.moe._row_sums import dots_of_rows, sum_of_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int32


# The most choices of a token. A program adds them one after another, and would be too long.
MAX_TOP_K = 1024


@naming_devices
@jax.named_scope("fp8gemm_permute")
def permute(
    x: Float[Array, "m d"], indices: Int[Array, "m top_k"], num_experts: int
) -> tuple[Float[Array, "rows d"], Int32[Array, " num_experts"], Int32[Array, "m top_k"]]:
    """Copies each row once for each of its experts, and sorts the copies by expert, stably.

    Args:
      x: (m, d) bf16, f16 or f32.
      indices: (m, top_k) integers. A number outside 0..num_experts-1 is no expert. Its copy comes
        after all groups, where moe_mlp and ragged_dot make it zero.
      num_experts: at least 1.
    Returns:
      rows (m * top_k, d), group_sizes (num_experts,) and order (m, top_k), which unpermute takes:
      rows[order[i, j]] is the copy of x[i] for expert indices[i, j]. rows is differentiable in x.
    Raises:
      TypeError: a dtype, or num_experts traced.
      ValueError: shapes, num_experts < 1, or num_experts or m * top_k from 2^31 on.
    """
    op = "permute"
    x, indices = map(arrays.as_array, (x, indices))
    for name, operand in (("x", x), ("indices", indices)):
        checks.check_array(op, name, operand)
    checks.check_dtype(op, "x", x, formats.FLOAT_DTYPES)
    checks.check_ndim(op, "x", x, 2, "(m, d)")
    checks.check_integers(op, "indices", indices)
    if indices.ndim != 2 or indices.shape[0] != x.shape[0] or indices.shape[1] == 0:
        raise ValueError(
            f"{op}: indices must be (m, top_k) for x (m, d), with top_k >= 1; "
            f"got indices {checks.short_type(indices)}, x {checks.short_type(x)}"
        )
    checks.check_static(op, num_experts=num_experts)
    count = checks.as_index(num_experts)
    if count is None or count < 1:
        raise ValueError(
            f"{op}: num_experts must be an integer, at least 1; got "
            f"{checks.short_repr(num_experts)}"
        )
    checks.check_count(op, "num_experts", count, indices)
    _check_choices(op, indices)
    x, indices = _prepare(op, x, as_int32(indices, lowest=-1))
    group_sizes, choice, order = sort_choices(indices, count)
    rows = reverse_mode(op, _copy_rows, x, choice, order)
    return rows, group_sizes, order


@naming_devices
@jax.named_scope("fp8gemm_unpermute")
def unpermute(
    rows: Float[Array, "rows d"],
    order: Int32[Array, "m top_k"],
    weights: Float[Array, "m top_k"],
    *,
    batch_invariant: bool = False,
) -> Float[Array, "m d"]:
    """Adds up the rows of each token by weight: sum over j of weights[i, j] * rows[order[i, j]].

    The sum is computed in f32, j ascending, and rounded to the dtype of rows.

    Args:
      rows: (m * top_k, d) bf16, f16 or f32, sorted by expert.
      order: (m, top_k) int32, from permute.
      weights: (m, top_k) bf16, f16 or f32.
      batch_invariant: whether the result of a token, and its gradients, have bits that neither the
        other tokens nor the program around change (docs/numerics.md).
    Returns:
      (m, d) array. Differentiable in rows and weights.
    Raises:
      TypeError: a dtype is wrong.
      ValueError: shapes are wrong, or top_k is above 1024.
    """
    op = "unpermute"
    rows, order, weights = map(arrays.as_array, (rows, order, weights))
    for name, operand in (("rows", rows), ("order", order), ("weights", weights)):
        checks.check_array(op, name, operand)
    for name, operand in (("rows", rows), ("weights", weights)):
        checks.check_dtype(op, name, operand, formats.FLOAT_DTYPES)
    checks.check_dtype(op, "order", order, (jnp.dtype(jnp.int32),))
    shapes_agree = order.ndim == 2 and order.shape[1] > 0 and order.shape == weights.shape
    if not shapes_agree or rows.ndim != 2 or order.size != rows.shape[0]:
        raise ValueError(
            f"{op}: order and weights must be (m, top_k) for rows (m * top_k, d); "
            f"got order {checks.short_type(order)}, weights {checks.short_type(weights)}, "
            f"rows {checks.short_type(rows)}"
        )
    checks.check_bool(op, batch_invariant=batch_invariant)
    _check_choices(op, order)
    operands = _prepare(op, rows, order, weights)
    return transposable_by_none(op, _add_weighted(batch_invariant, *operands))


def _check_choices(op: str, choices: Any) -> None:
    """Raises ValueError unless int32 can number choices (m, top_k), and a token has few enough."""
    checks.check_count(op, "m * top_k", choices.size, choices)
    check_top_k(op, choices.shape[1], choices)


def check_top_k(op: str, top_k: int, x: Any) -> None:
    """Raises ValueError if `top_k` is above MAX_TOP_K; the error shows the type of `x`."""
    if top_k > MAX_TOP_K:
        raise ValueError(
            f"{op}: top_k must be at most {MAX_TOP_K}; got {top_k}, {checks.short_type(x)}"
        )


def _prepare(op: str, *operands: Any) -> tuple[jax.Array, ...]:
    return match_varying(*(replicate(op, jnp.asarray(x)) for x in operands))


@jax.custom_vjp
def _copy_rows(x: jax.Array, choice: jax.Array, order: jax.Array) -> jax.Array:
    return take_rows(x, choice // order.shape[1])


def _copy_rows_bwd(order: jax.Array, drows: jax.Array) -> tuple[Any, ...]:
    dx = sum_of_rows(drows, order, None, dtype=drows.dtype, batch_invariant=False)
    return dx, None, None


_copy_rows.defvjp(lambda x, choice, order: (_copy_rows(x, choice, order), order), _copy_rows_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_weighted(
    batch_invariant: bool, rows: jax.Array, order: jax.Array, weights: jax.Array
) -> jax.Array:
    columns = tuple(weights.T)
    return sum_of_rows(rows, order, columns, dtype=rows.dtype, batch_invariant=batch_invariant)


def _add_weighted_fwd(batch_invariant: bool, *operands: jax.Array) -> Any:
    return _add_weighted(batch_invariant, *operands), operands


def _add_weighted_bwd(batch_invariant: bool, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
    rows, order, weights = residuals
    if batch_invariant:
        rows, weights, dout = only_once("unpermute", rows, weights, dout)
    choice = inverse(order.reshape(-1))
    dweights = dots_of_rows(rows, order, dout, dtype=weights.dtype, batch_invariant=batch_invariant)
    dout = exact_f32(dout) if batch_invariant else dout.astype(jnp.float32)
    weight = take_rows(weights.astype(jnp.float32).reshape(-1), choice)
    drows = take_rows(dout, choice // order.shape[1]) * weight[:, None]
    drows = rounded(drows, rows.dtype) if batch_invariant else drows.astype(rows.dtype)
    return drows, None, dweights


_add_weighted.defvjp(_add_weighted_fwd, _add_weighted_bwd)
