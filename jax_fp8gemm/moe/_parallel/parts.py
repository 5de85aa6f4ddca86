"""Parts: into how many parts a device divides its tokens, and in which order XLA runs them.

The tokens of part i + 1 travel, and the results of part i - 1 travel back, while the experts
compute part i. XLA does that, if its latency-hiding scheduler is on: what travels depends on no
product of another part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Arrays = TypeVar("Arrays")  # a pytree of arrays
Part = TypeVar("Part")
NumParts = Literal[1, 2, 4]
NUMBERS: tuple[NumParts, ...] = (1, 2, 4)


def sizes_of_parts(tokens: int, num_parts: int) -> list[int]:
    """Returns the tokens of each part: as even as they can be, and none without a token."""
    num_parts = max(1, min(num_parts, tokens))
    ends = [tokens * i // num_parts for i in range(num_parts + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def divide(tree: Arrays, sizes: Sequence[int]) -> list[Arrays]:
    """Returns the parts of a pytree of arrays (t, ...), which have these sizes."""
    if len(sizes) == 1:
        return [tree]
    starts = [0, *itertools.accumulate(sizes)]

    def cut(start: int, size: int) -> Arrays:
        return jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + size), tree)

    return [cut(start, size) for start, size in zip(starts, sizes, strict=False)]


def after(tree: Arrays, *earlier: Any) -> Arrays:
    """Returns `tree` such that what reads it runs after the arrays of `earlier` are there.

    XLA combines small collectives into one unless one depends on the other.
    """
    if not jax.tree.leaves(earlier):
        return tree
    return lax.optimization_barrier((tree, earlier))[0]


def in_order(
    parts: Sequence[Part], arrive: Callable[..., Arrays]
) -> Iterator[tuple[int, Part, Arrays]]:
    """Yields the number of each part, the part, and what arrives of it.

    arrive: called with the number of a part and what has arrived of the one before. Part i + 1 is
      sent before part i is yielded, so that it does not depend on what the caller makes of that.
    """
    arrived = arrive(0)
    for i, part in enumerate(parts):
        here = arrived
        if i + 1 < len(parts):
            arrived = arrive(i + 1, here)
        yield i, part, here


def at_the_end(parts: Sequence[Any], results: list[Arrays]) -> list[Arrays]:
    """Returns the results of all parts such that what reads them runs after all of them."""
    return results if len(parts) == 1 else lax.optimization_barrier(results)


def join(parts: Sequence[Arrays]) -> Arrays:
    """Undoes `divide`."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
