"""Slots: the tokens that each device needs, and the rows in which they travel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def assign_slots(devices: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The rank of each token (t, p) among those that a device needs, and how many it needs (p,).

    -1 where the device does not need the token.
    """
    t = devices.shape[0]
    needs = (devices[:, :, None] == jnp.arange(size, dtype=jnp.int32)[None, None]).any(axis=1)
    rank = jnp.cumsum(needs, axis=0, dtype=jnp.int32)
    counts = rank[-1] if t else jnp.zeros((size,), jnp.int32)
    return jnp.where(needs, rank - 1, -1), counts


def pack(
    x: jax.Array, positions: jax.Array, has_one: jax.Array, num_rows: int, empty: Any
) -> jax.Array:
    """x[i] in the rows positions[i, :] (t, p) of (num_rows, ...)."""
    t, p = positions.shape
    # A place of its own, outside, for each token that has none: no two write to the same place.
    outside = num_rows + jnp.arange(t * p, dtype=jnp.int32).reshape(t, p)
    place = jnp.where(has_one, positions, outside).reshape(-1)
    token = jnp.repeat(jnp.arange(t, dtype=jnp.int32), p)
    source = jnp.full((num_rows,), t, jnp.int32)
    source = source.at[place].set(token, mode="drop", unique_indices=True)
    if empty is not None:
        return x.at[source].get(mode="fill", fill_value=empty)
    return x.at[source].get(mode="clip")


def unpack(rows: jax.Array, positions: jax.Array, has_one: jax.Array) -> Sequence[jax.Array]:
    shape = has_one.shape[0], *(1,) * (rows.ndim - 1)
    zero = jnp.zeros((), rows.dtype)
    return [
        jnp.where(has.reshape(shape), rows.at[at].get(mode="clip"), zero)
        for at, has in zip(positions.T, has_one.T, strict=True)
    ]


def add_parts(parts: Sequence[jax.Array]) -> jax.Array:
    """f32 sum, one addition after another: a reduction would leave their order to XLA."""
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
