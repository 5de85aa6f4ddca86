"""The grouped products without FP8: jax.lax.ragged_dot and ragged_dot_general, made to fit.

Groups start at first_row, int32 (1,). Rows of no group are zero in a result and reach no sum,
whatever they hold. bf16, f16 and f32 promote to f32 unless equal.

Each product is the derivative of the other. lax has no derivative of the contraction, none of
either over Explicit mesh axes, and no vmap over some operands only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._ops.product_spec import Shardings, shardings_of
from jax_fp8gemm._ops.reverse_mode import transposable_by_none
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes
from jax_fp8gemm._sharding.manual_axes import match_varying

_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


@dataclass(frozen=True)
class _Options:
    """What is static about a product."""

    precision: Any
    out_dtype: Any
    shardings: Shardings


def xla_ragged_dot(
    lhs, rhs, sizes, first_row, precision: Any, out_dtype: Any, out_spec: Any = None
) -> jax.Array:
    """out[rows] = lhs[rows] . rhs[i] for the rows of each group i.

    out_spec: how Explicit mesh axes cut the result; None where no axis is Explicit.
    """
    options = _Options(precision, out_dtype, shardings_of(lhs, rhs, out_spec))
    out = _dot(options, *match_varying(lhs, rhs, sizes, first_row))
    return transposable_by_none("ragged_dot", out)


def xla_ragged_contraction(
    lhs, rhs, sizes, first_row, precision: Any, out_dtype: Any, out_spec: Any = None
) -> jax.Array:
    """out[i] = lhs[rows]^T . rhs[rows]. out_spec: as for xla_ragged_dot."""
    options = _Options(precision, out_dtype, shardings_of(lhs, rhs, out_spec))
    out = _contraction(options, *match_varying(lhs, rhs, sizes, first_row))
    return transposable_by_none("ragged_dot_general", out)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(options: _Options, *operands) -> jax.Array:
    @sequential_vmap
    def dot(lhs, rhs, sizes, first_row):
        is_in_group, sizes = _groups_from_row_0(sizes, first_row, lhs.shape[0])
        lhs, rhs = _promote(lhs, rhs)
        lhs = jnp.where(is_in_group, lhs, 0)
        out = lax.ragged_dot(lhs, rhs, sizes, **_lax_options(options, lhs, 2))
        return jnp.where(is_in_group, out.astype(options.out_dtype), 0)

    return with_auto_axes(dot, operands, lambda: options.shardings.out)


def _dot_fwd(options: _Options, *operands) -> tuple[jax.Array, Any]:
    return _dot(options, *operands), operands


def _dot_bwd(options: _Options, operands: Any, dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, sizes, first_row = operands
    groups, precision, shardings = (sizes, first_row), options.precision, options.shardings
    dlhs = xla_ragged_dot(dout, rhs.mT, *groups, precision, lhs.dtype, shardings.lhs)
    drhs = xla_ragged_contraction(lhs, dout, *groups, precision, rhs.dtype, shardings.rhs)
    return dlhs, drhs, None, None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contraction(options: _Options, *operands) -> jax.Array:
    @sequential_vmap
    def contract(lhs, rhs, sizes, first_row):
        is_in_group, sizes = _groups_from_row_0(sizes, first_row, lhs.shape[0])
        lhs, rhs = (jnp.where(is_in_group, x, 0) for x in _promote(lhs, rhs))
        how = _lax_options(options, lhs, 3)
        out = lax.ragged_dot_general(lhs, rhs, sizes, _OVER_ROWS, **how)
        return out.astype(options.out_dtype)

    return with_auto_axes(contract, operands, lambda: options.shardings.out)


def _contraction_fwd(options: _Options, *operands) -> tuple[jax.Array, Any]:
    return _contraction(options, *operands), operands


def _contraction_bwd(options: _Options, operands: Any, dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, sizes, first_row = operands
    groups, precision, shardings = (sizes, first_row), options.precision, options.shardings
    dlhs = xla_ragged_dot(rhs, dout.mT, *groups, precision, lhs.dtype, shardings.lhs)
    drhs = xla_ragged_dot(lhs, dout, *groups, precision, rhs.dtype, shardings.rhs)
    return dlhs, drhs, None, None


_dot.defvjp(_dot_fwd, _dot_bwd)
_contraction.defvjp(_contraction_fwd, _contraction_bwd)


def _groups_from_row_0(sizes, first_row, m: int) -> tuple[jax.Array, jax.Array]:
    """Which rows are in a group, (m, 1), and sizes for lax: its first group starts at row 0.

    That group then holds the rows before ours too, which the mask makes zero.
    """
    starts, ends = _groups.row_ranges(sizes, first_row, m)
    rows = jnp.arange(m, dtype=jnp.int32)[:, None]
    sizes_from_0 = ends - jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    return (starts[0] <= rows) & (rows < ends[-1]), sizes_from_0


def _promote(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = lhs.dtype if lhs.dtype == rhs.dtype else jnp.float32
    return lhs.astype(dtype), rhs.astype(dtype)


def _sum_dtype(lhs: jax.Array, out_dtype: Any) -> Any:
    """The dtype to ask lax for: a sum in f16 of bf16 operands, say, would be rounded to bf16."""
    return out_dtype if out_dtype == lhs.dtype else jnp.float32


def _lax_options(options: _Options, lhs: jax.Array, out_ndim: int) -> dict[str, Any]:
    return dict(
        precision=options.precision,
        preferred_element_type=_sum_dtype(lhs, options.out_dtype),
        out_sharding=_unsharded(lhs, out_ndim),
    )


def _unsharded(x: jax.Array, ndim: int) -> NamedSharding:
    """The sharding of a result on the mesh of `x`: lax infers none over Explicit axes."""
    return jax.typeof(x).sharding.update(spec=PartitionSpec(*(None,) * ndim))
