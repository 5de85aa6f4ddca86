"""einsum: jnp.einsum of two operands in FP8, by dot_general."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.bind import bind
from jax_fp8gemm._ops.dot_general import dot_general
from jax_fp8gemm._ops.einsum_of_weight import einsum_of_weight
from jax_fp8gemm._ops.product_spec import check_static_args
from jax_fp8gemm._ops.weights import check_weight, unquantised

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@naming_devices
def einsum(
    subscripts: str,
    *operands: Float[Array, ...] | QuantizedWeight,
    precision: Any = None,
    preferred_element_type: Any = None,
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
    out_sharding: Any = None,
) -> Float[Array, ...]:
    """Contracts two arrays as jnp.einsum does, in FP8 with f32 accumulation.

    jnp.einsum maps the subscripts to one dot_general, and transposes and sums around it. Batch
    dimensions take one product for each element. It is differentiable once, in reverse mode.

    Args:
      subscripts: as for jnp.einsum, "bsd,dnh->bsnh" or with an ellipsis.
      operands: two arrays, as for `dot_general`. The second one may be a QuantizedWeight. It is
        then the rhs of the product whatever the order of the result, and several contracting
        dimensions are flattened in the order of its `contracting`. jnp.einsum may swap operands for
        a result that it would have to transpose, and sorts those dimensions by their letters. A
        ScaledArray goes into `matmul` or `dot_general`.
      precision, preferred_element_type, recipe, implementation, out_sharding: as for `matmul`.
    Returns:
      The array that the subscripts say.
    Raises:
      TypeError: subscripts is no text, there are not two operands, or a dtype is wrong.
      ValueError: precision, implementation, out_sharding, or subscripts that do not fit the
        operands, in the words of jnp.einsum.
      NotImplementedError: a second derivative is taken.
      RuntimeError: implementation="cuda", and the kernels cannot run.
    """
    op = "einsum"
    if not isinstance(subscripts, str):
        raise TypeError(
            f"{op}: subscripts must be text, as 'mk,kn->mn'; got {checks.short_repr(subscripts)}"
        )
    if len(operands) != 2:
        raise TypeError(
            f"{op}: operands must be two arrays; got {len(operands)}. Contract two at a time: "
            "jnp.einsum_path finds an order."
        )
    lhs, rhs = arrays.match_floats(*map(arrays.as_array, operands))
    check_unquantised(op, "lhs", lhs)
    if isinstance(rhs, ScaledArray):
        raise TypeError(
            f"{op}: rhs must be an array or a QuantizedWeight; got a ScaledArray "
            f"{checks.short_type(rhs)}. matmul and dot_general take a ScaledArray (k, n): "
            "matmul(lhs, rhs), or matmul(lhs, rhs.T) for the other dimension."
        )
    check_weight(op, "rhs", rhs)
    spec = check_static_args(
        op, lhs, rhs, recipe, precision, preferred_element_type, implementation, out_sharding
    )
    if isinstance(rhs, QuantizedWeight) and spec.is_fp8:
        return einsum_of_weight(op, spec, subscripts, lhs, rhs, out_sharding)
    return jnp.einsum(
        subscripts,
        lhs,
        unquantised(rhs),
        precision=precision,
        preferred_element_type=spec.out_dtype,
        out_sharding=out_sharding,
        _dot_general=bind(dot_general, spec.recipe, implementation),
    )
