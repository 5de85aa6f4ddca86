"""bind: an op with its recipe and implementation, for libraries that take a function like JAX's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import Recipe
from jax_fp8gemm._ops.product_spec import check_recipe


def bind(
    op: Callable[..., Any], recipe: Recipe | str, implementation: Implementation
) -> functools.partial[Any]:
    """Returns `op` with these keywords, once they are checked: one function for equal arguments."""
    checks.check_implementation(op.__name__, implementation)
    return _bind(op, check_recipe(op.__name__, recipe), implementation)


# NOTE: JAX and Flax keep what they compile by the identity of the function that they are given.
@functools.cache
def _bind(
    op: Callable[..., Any], recipe: Recipe, implementation: Implementation
) -> functools.partial[Any]:
    return functools.partial(op, recipe=recipe, implementation=implementation)
