"""dot_general: lax.dot_general in FP8, by the product of matmul (_ops/product.py)."""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.contract import Dims, contract
from jax_fp8gemm._ops.matmul import matmul
from jax_fp8gemm._ops.product_spec import check_static_args, out_spec_of
from jax_fp8gemm._ops.weights import check_weight, check_weights, unquantised

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@naming_devices
def dot_general(
    lhs: Float[Array, ...],
    rhs: Float[Array, ...] | QuantizedWeight | ScaledArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
    **kwargs: Any,
) -> Float[Array, ...]:
    """Contracts two arrays as jax.lax.dot_general does, in FP8 with f32 accumulation.

    Flax takes it as an argument: `nnx.Linear(..., dot_general=jax_fp8gemm.dot_general)`,
    `nn.Dense(dot_general=...)`. functools.partial binds a recipe. Several contracting dimensions
    are flattened into one k, in the order given, and quantised along it. XLA transposes operands
    in other layouts than lhs (..., k) and rhs (k, ...), which takes a copy. One product runs for
    each element of the batch dimensions. The result is differentiable once, in reverse mode.

    Args:
      lhs, rhs: bf16, f16 or f32. One of them may hold integers, as for `matmul`. Or rhs is a
        QuantizedWeight for these contracting dimensions, or for the free ones; its leading
        dimensions are those of the batch. Or rhs is a ScaledArray (k, n) as `matmul` takes it, the
        last dimension of lhs is contracted, and there is no batch.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision, preferred_element_type, recipe, implementation, out_sharding: as for `matmul`.
      kwargs: further arguments, for callers that pass more than lax takes. Each must be None.
    Returns:
      An array with the batch dimensions, then the free ones of lhs, then those of rhs.
    Raises:
      TypeError: a dtype, a shape or dimension_numbers is wrong, or a further argument is not None.
      ValueError: precision, implementation or out_sharding is wrong.
      NotImplementedError: a second derivative is taken.
      RuntimeError: implementation="cuda", and the kernels cannot run.
    """
    op = "dot_general"
    if unknown := sorted(name for name, value in kwargs.items() if value is not None):
        raise TypeError(f"{op}: arguments beyond lax.dot_general's must be None; got {unknown}")
    lhs, rhs = arrays.match_floats(*map(arrays.as_array, (lhs, rhs)))
    check_unquantised(op, "lhs", lhs)
    if isinstance(rhs, ScaledArray):
        check_weights(op, "rhs", rhs)
        _check_plain(op, lhs, rhs, _check_dimension_numbers(op, lhs, rhs, dimension_numbers))
        return matmul(
            lhs,
            rhs,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            recipe=recipe,
            implementation=implementation,
        )
    check_weight(op, "rhs", rhs)
    dims = _check_dimension_numbers(op, lhs, rhs, dimension_numbers)
    spec = check_static_args(
        op, lhs, rhs, recipe, precision, preferred_element_type, implementation, out_sharding
    )
    xla = partial(lax.dot_general, dimension_numbers=dims, **spec.xla_args(out_sharding))
    if not spec.is_fp8:
        rhs = unquantised(rhs)
        if not spec.is_exact:
            return xla(lhs, rhs)
    operands: tuple[Any, Any] = jax.tree.map(jnp.asarray, (lhs, rhs))
    return contract(op, spec, dims, *operands, out_spec_of(xla, spec.out_dtype, *operands))


def _check_plain(op: str, lhs: Any, rhs: ScaledArray, dims: Any) -> None:
    if dims != (((lhs.ndim - 1,), (0,)), ((), ())) or rhs.ndim != 2:
        raise ValueError(
            f"{op}: a ScaledArray rhs must be (k, n), contracted with the last dimension of lhs, "
            f"without batch dimensions; got lhs {checks.short_type(lhs)}, rhs "
            f"{checks.short_type(rhs)}, {dims}. For other dimensions pass a QuantizedWeight."
        )


def _check_dimension_numbers(op: str, lhs: Any, rhs: Any, dimension_numbers: Any) -> Any:
    """Returns the dimension numbers as non-negative tuples, checked against the shapes."""
    try:
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = (
            [tuple(map(operator.index, dims)) for dims in pair] for pair in dimension_numbers
        )
    except (AttributeError, IndexError, TypeError, ValueError):  # what unpacking anything raises
        raise TypeError(
            f"{op}: dimension_numbers must be ((lhs contracting, rhs contracting), (lhs batch, rhs "
            f"batch)), each a sequence of ints; got {checks.short_repr(dimension_numbers)}"
        ) from None
    got = f"lhs {checks.short_type(lhs)}, rhs {checks.short_type(rhs)}, {dimension_numbers}"

    def normalize(x: Any, dims: Any) -> Dims:
        if not all(-x.ndim <= d < x.ndim for d in dims):
            raise TypeError(f"{op}: dimension numbers must be within the ranks; got {got}")
        return tuple(d % x.ndim for d in dims)

    lhs_contract, lhs_batch = normalize(lhs, lhs_contract), normalize(lhs, lhs_batch)
    rhs_contract, rhs_batch = normalize(rhs, rhs_contract), normalize(rhs, rhs_batch)
    for dims in ((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch)):
        if len(set(dims)) != len(dims):
            raise TypeError(f"{op}: dimension numbers must name a dimension once; got {got}")
    for kind, lhs_dims, rhs_dims in (
        ("contracting", lhs_contract, rhs_contract),
        ("batch", lhs_batch, rhs_batch),
    ):
        if [lhs.shape[d] for d in lhs_dims] != [rhs.shape[d] for d in rhs_dims]:
            raise TypeError(f"{op}: {kind} dimensions of lhs and rhs must agree; got {got}")
    num_products = math.prod(lhs.shape[d] for d in lhs_batch)
    checks.check_count(op, "the number of products", num_products, got)
    return (lhs_contract, rhs_contract), (lhs_batch, rhs_batch)
