"""xla_ragged_dot and xla_ragged_contraction: the grouped products without FP8, from lax.

They add to jax.lax.ragged_dot and jax.lax.ragged_dot_general what ragged_dot promises:

- Groups may start at another row than row 0. Rows of no group are zero in a result and reach no
  sum, whatever they hold.
- bf16, f16 and f32 promote to f32 unless the operands have the same dtype.
- Each product is the derivative of the other. lax cannot differentiate the contraction, nor either
  product over Explicit mesh axes.
- jax.vmap may batch some operands only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._data.groups import Groups, row_ranges
from jax_fp8gemm._ops.precision import XlaPrecision
from jax_fp8gemm._ops.product_spec import DType, Shardings, shardings_of
from jax_fp8gemm._ops.reverse_mode import transposable_by_none
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes
from jax_fp8gemm._sharding.manual_axes import match_varying

_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


class XlaOptions(NamedTuple):
    """The options that a caller chooses for a product.

    Attributes:
      precision: the precision of the XLA product, or None for the default.
      out_dtype: the dtype of the result.
      out_spec: how Explicit mesh axes cut the result; None where no axis is Explicit.
    """

    precision: XlaPrecision | None
    out_dtype: DType
    out_spec: PartitionSpec | None = None


@dataclass(frozen=True)
class _Static:
    """The static properties of a product; contracts_rows says which of the two it is."""

    contracts_rows: bool
    precision: XlaPrecision | None
    out_dtype: DType
    shardings: Shardings


def xla_ragged_dot(
    lhs: jax.Array, rhs: jax.Array, groups: Groups, options: XlaOptions
) -> jax.Array:
    """Returns out[rows] = lhs[rows] . rhs[i] for the rows of each group i."""
    out = _run(False, lhs, rhs, groups, options)
    return transposable_by_none("ragged_dot", out)


def xla_ragged_contraction(
    lhs: jax.Array, rhs: jax.Array, groups: Groups, options: XlaOptions
) -> jax.Array:
    """Returns out[i] = lhs[rows]^T . rhs[rows] for the rows of each group i."""
    out = _run(True, lhs, rhs, groups, options)
    return transposable_by_none("ragged_dot_general", out)


def _run(
    contracts_rows: bool, lhs: jax.Array, rhs: jax.Array, groups: Groups, options: XlaOptions
) -> jax.Array:
    precision, out_dtype, out_spec = options
    static = _Static(contracts_rows, precision, out_dtype, shardings_of(lhs, rhs, out_spec))
    return _product(static, *match_varying(lhs, rhs, groups))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: _Static, *operands) -> jax.Array:
    @sequential_vmap
    def product(lhs, rhs, groups):
        is_in_group, sizes = _groups_from_row_0(groups, lhs.shape[0])
        lhs, rhs = _promote(lhs, rhs)
        run = _contract if static.contracts_rows else _dot
        return run(static, lhs, rhs, sizes, is_in_group)

    return with_auto_axes(product, operands, lambda: static.shardings.out)


def _dot(static: _Static, lhs, rhs, sizes, is_in_group) -> jax.Array:
    lhs = jnp.where(is_in_group, lhs, 0)
    out = lax.ragged_dot(lhs, rhs, sizes, **_lax_options(static, lhs, 2))
    return jnp.where(is_in_group, out.astype(static.out_dtype), 0)


def _contract(static: _Static, lhs, rhs, sizes, is_in_group) -> jax.Array:
    lhs, rhs = (jnp.where(is_in_group, x, 0) for x in (lhs, rhs))
    how = _lax_options(static, lhs, 3)
    return lax.ragged_dot_general(lhs, rhs, sizes, _OVER_ROWS, **how).astype(static.out_dtype)


def _product_fwd(static: _Static, *operands) -> tuple[jax.Array, tuple[Any, ...]]:
    return _product(static, *operands), operands


def _product_bwd(
    static: _Static, operands: tuple[jax.Array, jax.Array, Groups], dout: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, groups = operands
    for_lhs = XlaOptions(static.precision, lhs.dtype, static.shardings.lhs)
    for_rhs = XlaOptions(static.precision, rhs.dtype, static.shardings.rhs)
    if static.contracts_rows:
        dlhs = xla_ragged_dot(rhs, dout.mT, groups, for_lhs)
        drhs = xla_ragged_dot(lhs, dout, groups, for_rhs)
    else:
        dlhs = xla_ragged_dot(dout, rhs.mT, groups, for_lhs)
        drhs = xla_ragged_contraction(lhs, dout, groups, for_rhs)
    return dlhs, drhs, None


_product.defvjp(_product_fwd, _product_bwd)


def _groups_from_row_0(groups: Groups, m: int) -> tuple[jax.Array, jax.Array]:
    """Returns a mask (m, 1) of the rows in a group, and sizes for lax.

    In lax the first group starts at row 0. It gets the rows before our first group too, and the
    mask makes them zero.
    """
    starts, ends = row_ranges(*groups, m)
    rows = jnp.arange(m, dtype=jnp.int32)[:, None]
    sizes_from_0 = ends - jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    return (starts[0] <= rows) & (rows < ends[-1]), sizes_from_0


def _promote(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = lhs.dtype if lhs.dtype == rhs.dtype else jnp.float32
    return lhs.astype(dtype), rhs.astype(dtype)


def _sum_dtype(lhs: jax.Array, out_dtype: DType) -> DType:
    """Returns the result dtype to request from lax.

    With f16 for bf16 operands, for example, lax would round the sum to bf16 first.
    """
    return out_dtype if out_dtype == lhs.dtype else jnp.dtype(jnp.float32)


def _lax_options(static: _Static, lhs: jax.Array, out_ndim: int) -> dict[str, Any]:
    return dict(
        precision=static.precision,
        preferred_element_type=_sum_dtype(lhs, static.out_dtype),
        out_sharding=_unsharded(lhs, out_ndim),
    )


def _unsharded(x: jax.Array, ndim: int) -> NamedSharding:
    """Returns a replicated sharding on the mesh of `x`, for lax infers none over Explicit axes."""
    return jax.typeof(x).sharding.update(spec=PartitionSpec(*(None,) * ndim))
