"""Slots: the tokens that each device needs, and the rows in which they travel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """The tokens of this device that each device needs.

    Attributes:
      rank: (t, p) int32, the rank of each token among the tokens that a device needs; -1 if it does
        not need the token.
      counts: (p,) int32, the number of tokens that each device needs.
    """

    rank: jax.Array
    counts: jax.Array


def assign_slots(devices: jax.Array, size: int) -> Slots:
    """Returns the slots of tokens whose choices lie on these devices (t, top_k) of `size`."""
    t = devices.shape[0]
    needs = (devices[:, :, None] == jnp.arange(size, dtype=jnp.int32)[None, None]).any(axis=1)
    rank = jnp.cumsum(needs, axis=0, dtype=jnp.int32)
    counts = rank[-1] if t else jnp.zeros((size,), jnp.int32)
    return Slots(jnp.where(needs, rank - 1, -1), counts)


def pack(
    x: jax.Array, positions: jax.Array, has_one: jax.Array, num_rows: int, empty: int | None
) -> jax.Array:
    """Returns an array (num_rows, ...) that has x[i] in each of the rows positions[i].

    Args:
      positions, has_one: (t, p), a row for each device, and whether the token has it.
      empty: what fills all other rows. None: they may hold anything.
    """
    t, p = positions.shape
    # A token without a row writes outside, to a place of its own: no two write to the same place.
    outside = num_rows + jnp.arange(t * p, dtype=jnp.int32).reshape(t, p)
    place = jnp.where(has_one, positions, outside).reshape(-1)
    token = jnp.repeat(jnp.arange(t, dtype=jnp.int32), p)
    source = jnp.full((num_rows,), t, jnp.int32)
    source = source.at[place].set(token, mode="drop", unique_indices=True)
    if empty is not None:
        return x.at[source].get(mode="fill", fill_value=empty)
    return x.at[source].get(mode="clip")


def unpack(rows: jax.Array, positions: jax.Array, has_one: jax.Array) -> Sequence[jax.Array]:
    """Undoes `pack`: for each device the rows (t, ...) of the tokens, zero where one has none."""
    shape = has_one.shape[0], *(1,) * (rows.ndim - 1)
    zero = jnp.zeros((), rows.dtype)
    return [
        jnp.where(has.reshape(shape), rows.at[at].get(mode="clip"), zero)
        for at, has in zip(positions.T, has_one.T, strict=True)
    ]


def add_parts(parts: Sequence[jax.Array]) -> jax.Array:
    """Returns the f32 sum of the parts, added one after another.

    A reduction would leave the order of the additions to XLA.
    """
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
