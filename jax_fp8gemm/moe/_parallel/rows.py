"""The rows that the experts of one device compute, in turns of some rows each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._primitives.copy_rows import copy_rows
from jax_fp8gemm.moe._choices import take_rows
from jax_fp8gemm.moe._parallel.exchange_kinds import TurnNumber

Sums = TypeVar("Sums")  # a pytree of arrays
Found = TypeVar("Found")  # likewise


class Received(NamedTuple):
    """What a device has received, and the rows that its experts make of it.

    Attributes:
      tokens: (r, d), the received tokens.
      weights: (r, top_k), the weights of their choices.
      sizes: (experts,), the number of rows of each local expert.
      choice: (rows,), the choice that each row comes from, numbered through (r, top_k).
      order: (r, top_k), the row of each choice. A choice of no local expert has a row after all
        groups.
    """

    tokens: ScaledArray
    weights: jax.Array
    sizes: jax.Array
    choice: jax.Array
    order: jax.Array


class Turn(NamedTuple):
    """The rows of one turn.

    Attributes:
      groups: the groups of the rows, one for each local expert.
      choice: the choice that each row comes from, numbered through (r, top_k).
      token: the received token that each row is a copy of; of a row of no group the first one.
      order: (r, top_k), the row of each choice, counted from the first row of the turn.
      has_row: (r, top_k), whether the choice has a row in this turn.
      places: (r, top_k), `order`, and -1 where a choice has no row.
    """

    groups: Groups
    choice: jax.Array
    token: jax.Array
    order: jax.Array
    has_row: jax.Array
    places: jax.Array


def rows_of_turn(received: Received, turn: TurnNumber, num_rows: int) -> Turn:
    """Returns the num_rows rows from row turn * num_rows on.

    A row of no expert belongs to no group.
    """
    first = turn * num_rows
    ends = jnp.clip(jnp.cumsum(received.sizes) - first, 0, num_rows)
    sizes = jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))
    choice = jnp.pad(received.choice, (0, -received.choice.shape[0] % num_rows))
    choice = lax.dynamic_slice_in_dim(choice, first, num_rows)
    order = received.order - first
    has_row = (order >= 0) & (order < ends[-1])
    groups = Groups.of_sizes(sizes)
    # Behind the groups come choices of no expert here. Copies of one token read it from the L2.
    is_used = jnp.arange(num_rows, dtype=jnp.int32) < ends[-1]
    token = jnp.where(is_used, choice // received.order.shape[1], 0)
    places = jnp.where(has_row, order, -1)
    return Turn(groups, choice, token, jnp.where(has_row, order, 0), has_row, places)


def copy_tokens(tokens: ScaledArray, turn: Turn, implementation: Implementation) -> ScaledArray:
    """Returns the rows of a turn, copies of `tokens`. A row of no group may hold anything."""
    num_rows = turn.choice.shape[0]
    return copy_rows(tokens, turn.places, num_rows, implementation=implementation)


def dequantized_rows(tokens: ScaledArray, turn: Turn) -> jax.Array:
    """Returns the rows of a turn in f32, by a gather that XLA can fuse with what reads it."""
    values, scale = (take_rows(x, turn.token) for x in values_and_scale(tokens))
    return ScaledArray(values, scale).dequantize(jnp.float32)


def with_later_turns(
    count: jax.Array | int, first: Callable[[], Found], later: Callable[[Found], Found]
) -> Found:
    """Returns later(first()) if there are several turns, else first(); an int `count` must be 1.

    XLA's host waits for the GPU where a program branches or loops as the data say. It waits before
    `first` here. Otherwise it would wait before the loop of `later`, with all of `first` done and
    nothing queued behind it.
    """
    return in_one_turn_or_more(count, first, lambda: later(first()))


def in_one_turn_or_more(
    count: jax.Array | int, one: Callable[[], Found], more: Callable[[], Found]
) -> Found:
    """Returns more() if there are several turns, else one(); an int `count` must be 1."""
    return one() if isinstance(count, int) else lax.cond(count > 1, more, one)


def add_turns(first: Sums, count: jax.Array | int, step: Callable[[jax.Array], Sums]) -> Sums:
    """Returns first + step(1) + ... + step(count - 1), for pytrees; an int `count` must be 1."""
    if isinstance(count, int):
        return first

    def add(state: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
        turn, total = state
        return turn + 1, jax.tree.map(jnp.add, total, step(turn))

    return lax.while_loop(lambda state: state[0] < count, add, (jnp.int32(1), first))[1]
