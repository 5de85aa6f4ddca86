"""bind: an op with its recipe and implementation, for libraries that take a function like JAX's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import Recipe


# NOTE: JAX and Flax keep what they compile by the identity of the function that they are given.
@functools.cache
def bind(
    op: Callable[..., Any], recipe: Recipe | str, implementation: Implementation
) -> functools.partial[Any]:
    """Returns `op` with these keywords: the same function for equal arguments."""
    return functools.partial(op, recipe=recipe, implementation=implementation)
