"""sum_rows_p: weighted sums of numbered rows.

For rows (m, k), places (s, c), weights (s, c) and every i < s:

    sums[i] = sum over j < c of weights[i, j] * rows[places[i, j]]

An expert-parallel layer adds the rows of each token in this way. Most choices of a token are those
of experts elsewhere, and have no row here. A gather would read a row for each of them; the kernel
reads the rows that there are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.rule import PartitionRule
from jax_fp8gemm._tuning import sum_rows_config

_OP = "sum_rows"


@jax.named_scope("fp8gemm_sum_rows")
def sum_rows(
    rows: jax.Array, places: jax.Array, weights: jax.Array, *, implementation: Implementation
) -> jax.Array:
    """Returns the weighted sums (s, k) of rows, in the dtype of rows.

    Args:
      rows: (m, k), bf16, f16 or f32. A row that no place names may hold anything, NaN too.
      places: (s, c) int32, the rows of each sum. A number that is no row adds zero.
      weights: (s, c) f32, the factors of these rows.
      implementation: None, "cuda", "xla" or "emulate".
    Returns:
      (s, k). On a GPU each product is rounded to f32, and they are added in f32 in the order of
      the places. Elsewhere XLA may make one operation of a product and a sum.
    """
    return sum_rows_p(rows, places, weights, implementation=implementation)[0]


def _shape_rule(rows, places, weights):
    checks.check_ndim(_OP, "rows", rows, 2, "(m, k)")
    checks.check_dtype(_OP, "rows", rows, sum_rows_config.DTYPES)
    checks.check_ndim(_OP, "places", places, 2, "(s, c)")
    checks.check_dtype(_OP, "places", places, (jnp.dtype(jnp.int32),))
    checks.check_dtype(_OP, "weights", weights, (jnp.dtype(jnp.float32),))
    if weights.shape != places.shape:
        raise ValueError(
            f"{_OP}: weights must have the shape of places; "
            f"got weights {checks.short_type(weights)}, places {checks.short_type(places)}"
        )
    return [jax.ShapeDtypeStruct((places.shape[0], rows.shape[1]), rows.dtype)]


def _reference(rows, places, weights):
    if 0 in (*rows.shape, *places.shape):
        return _zeros(rows, places, weights)
    is_row = (places >= 0) & (places < rows.shape[0])
    terms = (
        jnp.where(is_row[:, j, None], _rows_at(rows, places[:, j]) * weights[:, j, None], 0)
        for j in range(places.shape[1])
    )
    return [functools.reduce(jnp.add, terms).astype(rows.dtype)]


def _rows_at(rows, places):
    return rows.at[places].get(mode="clip").astype(jnp.float32)


def _zeros(*operands):
    return [jnp.zeros(x.shape, x.dtype) for x in _shape_rule(*operands)]


def _ffi_call(rows, places, weights):
    results = _shape_rule(rows, places, weights)
    if 0 in (*rows.shape, *places.shape):
        return _zeros(rows, places, weights)
    row_major = (0, 1)
    call = jax.ffi.ffi_call(
        extension.SUM_ROWS_TARGET,
        results,
        input_layouts=[row_major] * 3,
        output_layouts=[row_major],
    )
    return list(
        call(rows, places, weights, config=sum_rows_config.attributes(rows.dtype, rows.shape[1]))
    )


def _partition_rule(*_) -> PartitionRule:
    """A mesh may cut tokens and features. Rows are not cut, for a sum may add any of them."""
    return PartitionRule(("m k", "s c", "s c"), ("s k",), uncut=("m", "c"))


sum_rows_p = define_primitive(
    extension.SUM_ROWS_TARGET,
    _shape_rule,
    Forms(_reference, _ffi_call),
    mesh_rules=MeshRules(_partition_rule),
)
