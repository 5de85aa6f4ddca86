"""Rows of tokens for the experts of one device, computed some at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm.moe._choices import take_rows
from jax_fp8gemm.moe._operands import Groups


class Received(NamedTuple):
    """Tokens (r, d), the weights (r, top_k) of their choices, and the rows that those make.

    sizes: rows of each local expert. choice: of each row, numbered through (r, top_k). order:
    (r, top_k), the row of each choice; a choice of no local expert has one behind all groups.
    """

    tokens: ScaledArray
    weights: jax.Array
    sizes: jax.Array
    choice: jax.Array
    order: jax.Array


class Turn(NamedTuple):
    """The rows of one turn: their groups, their choices and tokens, and the row of each choice."""

    groups: Groups
    choice: jax.Array
    token: jax.Array
    order: jax.Array
    has_row: jax.Array


def rows_of_turn(received: Received, turn: Any, num_rows: int) -> Turn:
    """Rows turn * num_rows and on, num_rows of them; those of no expert belong to no group."""
    first = turn * num_rows
    ends = jnp.clip(jnp.cumsum(received.sizes) - first, 0, num_rows)
    sizes = jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))
    choice = jnp.pad(received.choice, (0, -received.choice.shape[0] % num_rows))
    choice = lax.dynamic_slice_in_dim(choice, first, num_rows)
    order = received.order - first
    has_row = (order >= 0) & (order < ends[-1])
    groups = Groups.of_sizes(sizes)
    token = choice // received.order.shape[1]
    return Turn(groups, choice, token, jnp.where(has_row, order, 0), has_row)


def copy_rows(tokens: ScaledArray, rows: jax.Array) -> ScaledArray:
    """The rows of these numbers."""
    return ScaledArray(take_rows(tokens.values, rows), take_rows(tokens.scale, rows))


def add_turns(first: Any, count: jax.Array | int, step: Callable[[jax.Array], Any]) -> Any:
    """first + step(1) + ... + step(count - 1); an int `count` is 1."""
    if isinstance(count, int):
        return first

    def add(state):
        turn, total = state
        return turn + 1, jax.tree.map(jnp.add, total, step(turn))

    return lax.while_loop(lambda state: state[0] < count, add, (jnp.int32(1), first))[1]
