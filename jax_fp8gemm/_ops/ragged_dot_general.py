"""ragged_dot_general: lax.ragged_dot_general in FP8, for ragged rows and a ragged contraction.

ragged_dot computes the former. _ops/ragged_product.py has the formulas of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import check_unquantised
from jax_fp8gemm._ops.product_spec import (
    ProductSpec,
    check_grouped,
    check_static_args,
    out_spec_of,
    with_shardings,
)
from jax_fp8gemm._ops.ragged_dot import check_operands, ragged_dot
from jax_fp8gemm._ops.ragged_product import ragged_contraction
from jax_fp8gemm._ops.ragged_xla import XlaOptions, xla_ragged_contraction
from jax_fp8gemm._ops.weights import as_matrices, check_weight, unquantised
from jax_fp8gemm._sharding.explicit_axes import reshard
from jax_fp8gemm._sharding.manual_axes import replicate, settle

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_SUPPORTED = (
    "ragged rows, (m, k), (g, k, n) -> (m, n), or a ragged contraction, (m, k), (m, n) -> "
    "(g, k, n), with the dimensions of lhs and rhs in any order"
)


@naming_devices
def ragged_dot_general(
    lhs: Float[Array, ...],
    rhs: Float[Array, ...] | QuantizedWeight,
    group_sizes: Int[Array, " g"],
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Int[Array, " 1"] | None = None,
    *,
    out_sharding: Any = None,
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
) -> Float[Array, ...]:
    """Computes jax.lax.ragged_dot_general in FP8, for ragged rows and for a ragged contraction.

    Ragged rows: (m, k), (g, k, n) -> (m, n). This is `ragged_dot`. Ragged contraction: (m, k),
    (m, n) -> (g, k, n). The next group_sizes[i] rows of lhs and rhs are contracted to element i of
    the result. The dimensions of lhs and rhs may come in any order, and XLA transposes them to the
    order above. The arguments are those of lax. jax.vmap runs one element after another. The
    product is differentiable once, in reverse mode. Its formats and scale blocks are those of the
    DeepSeek-V3 report, section 3.3, unless the recipe says otherwise.

    Args:
      lhs, rhs: bf16, f16 or f32. One of them may hold integers, as for `matmul`. For ragged rows
        rhs may be a QuantizedWeight, whose first dimension is that of the groups.
      group_sizes: as for `ragged_dot`. Rows past the sum reach no result.
      ragged_dot_dimension_numbers: a jax.lax.RaggedDotDimensionNumbers.
      precision: as for `ragged_dot`. HIGH or HIGHEST means jax.lax.ragged_dot_general.
      preferred_element_type, implementation, out_sharding: as for `ragged_dot`.
      group_offset: as for `ragged_dot`, for ragged rows only.
      recipe: the formats and scale blocks. Its wgrad has no effect on a ragged contraction, which
        runs in FP8.
    Returns:
      (m, n) or (g, k, n) array, zero for an empty group. Gradients have the dtypes of their
      operands, and are zero in rows of no group.
    Raises:
      TypeError: a dtype, a shape or the dimension numbers are wrong, as in lax.
      ValueError: precision or implementation is wrong, or there are more than 1024 groups.
      NotImplementedError: a batch is ragged, there are other batch dimensions, or several
        contracting or free ones, a ragged contraction has a group_offset, or a second derivative is
        taken.
      RuntimeError: implementation="cuda", and the kernels cannot run.

    The backward pass of a ragged contraction keeps lhs quantised along k and rhs along n, under the
    names of CHECKPOINT_NAMES.
    """
    op = "ragged_dot_general"
    operands = map(arrays.as_array, (lhs, rhs, group_sizes, group_offset))
    lhs, rhs, group_sizes, group_offset = operands
    lhs, rhs = arrays.match_floats(lhs, rhs)
    check_unquantised(op, "lhs", lhs)
    if isinstance(rhs, QuantizedWeight):
        check_weight(op, "rhs", rhs)
    else:
        checks.check_array(op, "rhs", rhs, hint="A ScaledArray goes into jax_fp8gemm.ragged_dot.")
        checks.check_dtype(op, "rhs", rhs, formats.FLOAT_DTYPES)
    lhs_order, rhs_order = _orders(op, lhs, rhs, ragged_dot_dimension_numbers)
    spec = check_static_args(
        op, lhs, rhs, recipe, precision, preferred_element_type, implementation, out_sharding
    )
    check_grouped(op, spec)
    lhs = jnp.transpose(lhs, lhs_order)
    if isinstance(rhs, QuantizedWeight) and spec.is_fp8 and rhs.ndim == 3:
        groups, k, _ = rhs_order
        rhs = as_matrices(op, "rhs", rhs, [k], [groups])
    else:
        rhs = jnp.transpose(unquantised(rhs), rhs_order)
    if isinstance(rhs, QuantizedWeight) or rhs.ndim == 3:
        check_operands(op, lhs, rhs, group_sizes, group_offset)
        return ragged_dot(
            lhs,
            rhs,
            group_sizes,
            precision,
            preferred_element_type,
            group_offset,
            recipe=recipe,
            implementation=implementation,
            out_sharding=out_sharding,
        )
    checks.check_array(op, "group_sizes", group_sizes)
    _groups.check_group_sizes(op, group_sizes, error=TypeError)
    _groups.check_rows(op, lhs, lhs.shape[0], group_sizes)
    if group_offset is not None:
        raise NotImplementedError(
            f"{op}: group_offset must be None in a ragged contraction; "
            f"got group_offset {checks.short_type(group_offset)}. Slice the result instead."
        )
    sizes = replicate(op, _groups.sizes_as_int32(group_sizes))
    lhs, rhs = settle(op, lhs), settle(op, rhs)
    out_spec = _out_spec(spec, lhs, rhs, out_sharding)
    spec = with_shardings(spec, lhs, rhs, out_spec)
    return reshard(_contract(spec, lhs, rhs, sizes), out_spec)


def _out_spec(
    spec: ProductSpec, lhs: jax.Array, rhs: jax.Array, out_sharding: Any
) -> PartitionSpec | None:
    """Returns how Explicit mesh axes cut a ragged contraction, or None where no axis is Explicit.

    By default they cut each group's result as they cut the contraction of all rows.
    """
    if out_sharding is not None:
        return getattr(out_sharding, "spec", out_sharding)
    product = lambda lhs, rhs: jnp.matmul(lhs.T, rhs)
    matrix_spec = out_spec_of(product, spec.out_dtype, lhs, rhs)
    return None if matrix_spec is None else PartitionSpec(None, *matrix_spec)


def _orders(op: str, lhs: Any, rhs: Any, numbers: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the orders in which lhs is (m, k), and rhs (g, k, n) or, to contract rows, (m, n)."""
    if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
        raise TypeError(
            f"{op}: ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers; "
            f"got {type(numbers).__name__}"
        )
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    got = f"got {numbers}, lhs {checks.short_type(lhs)}, rhs {checks.short_type(rhs)}"
    lhs_named, rhs_named = (*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch, *groups)
    for x, dims in ((lhs, lhs_named), (lhs, ragged), (rhs, rhs_named)):
        if len(set(dims)) != len(dims) or not all(0 <= d < x.ndim for d in dims):
            raise TypeError(
                f"{op}: dimension numbers must name dimensions of lhs and rhs, each once; {got}"
            )
    has_ragged_rows = not set(ragged) & set(lhs_named)
    if len(ragged) != 1 or len(groups) != int(has_ragged_rows):
        raise TypeError(
            f"{op}: lhs must have one ragged dimension, and rhs one group dimension where that "
            f"is one of rows, else none; {got}"
        )
    if [lhs.shape[d] for d in lhs_contract] != [rhs.shape[d] for d in rhs_contract]:
        raise TypeError(f"{op}: contracting dimensions of lhs and rhs must agree; {got}")
    is_matrix = lhs.ndim == 2 and rhs.ndim == 2 + len(groups)
    if not is_matrix or lhs_batch or rhs_batch or len(lhs_contract) != 1:
        raise NotImplementedError(
            f"{op}: supported are {_SUPPORTED}; {got}. Map batch dimensions with jax.vmap, or use "
            "jax.lax.ragged_dot_general."
        )
    rest = lambda x, dims: (*dims, *(d for d in range(x.ndim) if d not in dims))
    return rest(lhs, ragged), rest(rhs, (*groups, *rhs_contract))


@jax.named_scope("fp8gemm_ragged_dot_general")
def _contract(spec: ProductSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    if spec.is_fp8:
        return ragged_contraction(spec, lhs, rhs, sizes)
    options = XlaOptions(spec.xla_precision, spec.out_dtype, spec.shardings.out)
    return xla_ragged_contraction(lhs, rhs, Groups.of_sizes(sizes), options)
