"""The arrays that the functions of a mixture of experts take, and how they are grouped."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.scaled_array import ScaledArray

# What a caller passes as weights. A ScaledArray is quantised already and has no gradient.
Weights: TypeAlias = jax.Array | ScaledArray


class Groups(NamedTuple):
    """The groups of rows that are sorted by expert.

    Attributes:
      sizes: (g,) int32, the number of rows of each expert.
      first_row: (1,) int32, the row at which the first group starts.
    """

    sizes: jax.Array
    first_row: jax.Array

    @classmethod
    def of_sizes(cls, sizes: jax.Array) -> Groups:
        """Returns groups of these sizes, the first of which starts at row 0."""
        return cls(sizes, jnp.zeros((1,), jnp.int32))
