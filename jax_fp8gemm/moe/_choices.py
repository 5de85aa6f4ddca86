"""Choices: the experts that tokens choose, and the rows that these choices make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


def sort_choices(
    indices: Int32[Array, "m top_k"], num_experts: int
) -> tuple[Int32[Array, " num_experts"], Int32[Array, " rows"], Int32[Array, "m top_k"]]:
    """Sorts the choices of all tokens by expert, stably; choices of no expert come last.

    Choices are numbered row by row, through (m, top_k).

    Returns:
      group_sizes: the number of choices of each expert.
      choice: the number of the choice at each place.
      order: the place of each choice, the inverse of `choice`.
    """
    expert = indices.reshape(-1)
    expert = jnp.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    group_sizes = count_choices(expert, num_experts)
    choice = jnp.argsort(expert, stable=True).astype(jnp.int32)
    return group_sizes, choice, inverse(choice).reshape(indices.shape)


def count_choices(
    indices: Int32[Array, "*choices"], num_experts: int
) -> Int32[Array, " num_experts"]:
    """Returns how many choices name each expert. A choice of no expert counts nowhere."""
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    is_choice = indices.reshape(-1)[:, None] == experts[None]
    return jnp.sum(is_choice, axis=0, dtype=jnp.int32)


def limit(
    indices: Int32[Array, "m top_k"], num_experts: int, capacity: int
) -> Int32[Array, "m top_k"]:
    """Returns `indices` where only the first `capacity` choices of each expert name it.

    Later choices name no expert.
    """
    group_sizes, _, order = sort_choices(indices, num_experts)
    starts = jnp.cumsum(group_sizes) - group_sizes
    expert = jnp.clip(indices, 0, num_experts - 1)
    is_kept = order - take_rows(starts, expert) < capacity
    return jnp.where(is_kept, indices, num_experts)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns x[rows]; all of these rows must exist."""
    return x.at[rows].get(mode="promise_in_bounds")


def inverse(permutation: jax.Array) -> jax.Array:
    """Returns the inverse of a permutation of 0..n-1."""
    rank = jnp.arange(permutation.size, dtype=permutation.dtype)
    return jnp.zeros_like(permutation).at[permutation].set(rank, unique_indices=True)
