"""copy_rows_p: copies rows of FP8 values, with their 1x128 scales, to numbered rows.

For x (s, k) with scales (s, k/128), places (s, c) and every i < s and j < c:

    values[places[i, j]] = x[i]
    scale[places[i, j]] = x_scale[i]

An expert-parallel layer sorts the tokens that it has received by expert in this way, once for each
expert that a token has chosen. A gather would read a token for each of its copies; the kernel reads
it once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.rule import PartitionRule
from jax_fp8gemm._tuning import copy_rows_config

_OP = "copy_rows"


@jax.named_scope("fp8gemm_copy_rows")
def copy_rows(
    x: ScaledArray, places: jax.Array, num_rows: int, *, implementation: Implementation
) -> ScaledArray:
    """Returns num_rows rows, to which rows of x are copied.

    Args:
      x: (s, k) with block (1, 128).
      places: (s, c) int32, the rows that are copies of each row of x. A number that is no row means
        no copy. The others must differ.
      num_rows: the number of rows of the result.
      implementation: None, "cuda", "xla" or "emulate".
    Returns:
      (num_rows, k). A row that no place names holds anything on a GPU, NaN too. Elsewhere it is a
      copy of the first row of x.
    """
    operands = *values_and_scale(x), places
    values, scale = copy_rows_p(*operands, num_rows=num_rows, implementation=implementation)
    return ScaledArray(values, scale)


def _shape_rule(x, x_scale, places, *, num_rows: int):
    checks.check_ndim(_OP, "x", x, 2, "(s, k)")
    checks.check_scaled(_OP, "x", x, x_scale, (1, formats.SCALE_BLOCK))
    checks.check_ndim(_OP, "places", places, 2, "(s, c)")
    checks.check_dtype(_OP, "places", places, (jnp.dtype(jnp.int32),))
    if places.shape[0] != x.shape[0]:
        raise ValueError(
            f"{_OP}: places must be (s, c) for x (s, k); "
            f"got places {checks.short_type(places)}, x {checks.short_type(x)}"
        )
    return [jax.ShapeDtypeStruct((num_rows, array.shape[1]), array.dtype) for array in (x, x_scale)]


def _reference(x, x_scale, places, *, num_rows: int):
    if 0 in (*x.shape, *places.shape):
        return _zeros(x, x_scale, places, num_rows=num_rows)
    number = jax.lax.broadcasted_iota(jnp.int32, places.shape, 0)
    is_row = (places >= 0) & (places < num_rows)
    rows = jnp.zeros_like(places, shape=(num_rows,))
    # The gather of whole rows is faster than a scatter of them.
    rows = rows.at[jnp.where(is_row, places, num_rows)].set(number, mode="drop")
    return [array.at[rows].get(mode="promise_in_bounds") for array in (x, x_scale)]


def _zeros(*operands, num_rows: int):
    return [jnp.zeros(x.shape, x.dtype) for x in _shape_rule(*operands, num_rows=num_rows)]


def _ffi_call(x, x_scale, places, *, num_rows: int):
    results = _shape_rule(x, x_scale, places, num_rows=num_rows)
    if 0 in (*x.shape, *places.shape, num_rows):
        return _zeros(x, x_scale, places, num_rows=num_rows)
    # The scales arrive as collectives leave them, and leave as the products read them: rows minor.
    row_major, column_major = (0, 1), (1, 0)
    call = jax.ffi.ffi_call(
        extension.COPY_ROWS_TARGET,
        results,
        input_layouts=[row_major, row_major, row_major],
        output_layouts=[row_major, column_major],
    )
    return list(call(x, x_scale, places, config=copy_rows_config.attributes(x.shape[1])))


def _partition_rule(*_, num_rows: int) -> PartitionRule:
    """A mesh may cut the features alone, for a row of the result may come from any device."""
    return PartitionRule(
        ("s k", "s k", "s c"), ("m k", "m k"), {"k": formats.SCALE_BLOCK}, uncut=("s", "c", "m")
    )


copy_rows_p = define_primitive(
    extension.COPY_ROWS_TARGET,
    _shape_rule,
    Forms(_reference, _ffi_call),
    mesh_rules=MeshRules(_partition_rule),
)
