"""The grouped products without FP8: jax.lax.ragged_dot and ragged_dot_general, made to fit.

Groups start at first_row, int32 (1,). Rows of no group are zero in a result and reach no sum,
whatever they hold. bf16, f16 and f32 promote to f32 unless equal.

Each product is the derivative of the other. lax has no derivative of the contraction, none of
either over Explicit mesh axes, and no vmap over some operands only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm import _groups
from jax_fp8gemm._mesh_axes import match_varying

_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def xla_ragged_dot(lhs, rhs, sizes, first_row, precision: Any, out_dtype: Any) -> jax.Array:
    """out[rows] = lhs[rows] . rhs[i] for the rows of each group i."""
    return _dot(precision, out_dtype, *match_varying(lhs, rhs, sizes, first_row))


def xla_ragged_contraction(lhs, rhs, sizes, first_row, precision: Any, out_dtype: Any) -> jax.Array:
    """out[i] = lhs[rows]^T . rhs[rows]."""
    return _contraction(precision, out_dtype, *match_varying(lhs, rhs, sizes, first_row))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(precision: Any, out_dtype: Any, *operands) -> jax.Array:
    @sequential_vmap
    def dot(lhs, rhs, sizes, first_row):
        is_in_group, sizes = _groups_from_row_0(sizes, first_row, lhs.shape[0])
        lhs, rhs = _promote(lhs, rhs)
        lhs = jnp.where(is_in_group, lhs, 0)
        options = dict(precision=precision, preferred_element_type=_sum_dtype(lhs, out_dtype))
        out = lax.ragged_dot(lhs, rhs, sizes, **options, out_sharding=_unsharded(lhs, 2))
        return jnp.where(is_in_group, out.astype(out_dtype), 0)

    return dot(*operands)


def _dot_fwd(precision: Any, out_dtype: Any, *operands) -> tuple[jax.Array, Any]:
    return _dot(precision, out_dtype, *operands), operands


def _dot_bwd(precision: Any, out_dtype: Any, operands: Any, dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, sizes, first_row = operands
    dlhs = xla_ragged_dot(dout, rhs.mT, sizes, first_row, precision, lhs.dtype)
    drhs = xla_ragged_contraction(lhs, dout, sizes, first_row, precision, rhs.dtype)
    return dlhs, drhs, None, None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _contraction(precision: Any, out_dtype: Any, *operands) -> jax.Array:
    @sequential_vmap
    def contract(lhs, rhs, sizes, first_row):
        is_in_group, sizes = _groups_from_row_0(sizes, first_row, lhs.shape[0])
        lhs, rhs = (jnp.where(is_in_group, x, 0) for x in _promote(lhs, rhs))
        options = dict(precision=precision, preferred_element_type=_sum_dtype(lhs, out_dtype))
        options |= dict(out_sharding=_unsharded(lhs, 3))
        return lax.ragged_dot_general(lhs, rhs, sizes, _OVER_ROWS, **options).astype(out_dtype)

    return contract(*operands)


def _contraction_fwd(precision: Any, out_dtype: Any, *operands) -> tuple[jax.Array, Any]:
    return _contraction(precision, out_dtype, *operands), operands


def _contraction_bwd(
    precision: Any, out_dtype: Any, operands: Any, dout: jax.Array
) -> tuple[Any, ...]:
    lhs, rhs, sizes, first_row = operands
    dlhs = xla_ragged_dot(rhs, dout.mT, sizes, first_row, precision, lhs.dtype)
    drhs = xla_ragged_dot(lhs, dout, sizes, first_row, precision, rhs.dtype)
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


def _unsharded(x: jax.Array, ndim: int) -> NamedSharding:
    """The sharding of a result on the mesh of `x`: lax infers none over Explicit axes."""
    return jax.typeof(x).sharding.update(spec=PartitionSpec(*(None,) * ndim))
