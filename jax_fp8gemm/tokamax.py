"""ragged_dot: an implementation of tokamax's grouped product, by this package's::

    tokamax.ragged_dot(lhs, rhs, sizes, implementation=[jax_fp8gemm.tokamax.ragged_dot, "xla"])

tokamax calls it as its own implementations. A NotImplementedError makes it try the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._ops.ragged_dot_general import ragged_dot_general


def ragged_dot(
    lhs: Any,
    rhs: Any,
    *,
    group_sizes: Any,
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    group_offset: Any = None,
    manual_axis_type: Any = None,
    recipe: Recipe = DEEPSEEK_V3,
    implementation: Implementation = None,
    **kwargs: Any,
) -> jax.Array:
    """Multiplies as tokamax.ragged_dot_general does, in FP8 with f32 accumulation.

    functools.partial binds a recipe. Rows past the sum of the sizes are zero.

    Args:
      lhs, rhs: arrays, in the forms that jax_fp8gemm.ragged_dot_general takes.
      group_sizes: (g,) integers, or tokamax's GroupSizes.
      activation: applied to the f32 result, before it is rounded.
      manual_axis_type: has no part in it: the result varies over the axes of its operands.
      others: as for jax_fp8gemm.ragged_dot_general.
    Raises:
      NotImplementedError: an operand is quantised by qwix, or tokamax asks for more, such as
        fuse_gateup_activation.
      TypeError, ValueError: as for jax_fp8gemm.ragged_dot_general.
    """
    if any(hasattr(x, "qvalue") for x in (lhs, rhs)):
        raise NotImplementedError("tokamax.ragged_dot: operands must be arrays; got a QArray")
    if beyond := sorted(set(kwargs) - {"zero_initialize"}):
        raise NotImplementedError(f"tokamax.ragged_dot: arguments must be known; got {beyond}")
    dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    out = ragged_dot_general(
        lhs,
        rhs,
        jnp.asarray(group_sizes),
        ragged_dot_dimension_numbers,
        precision,
        jnp.float32 if activation else dtype,
        group_offset,
        recipe=recipe,
        implementation=implementation,
    )
    return activation(out).astype(dtype) if activation else out
