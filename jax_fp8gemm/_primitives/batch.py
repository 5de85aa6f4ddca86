"""map_batch: applies an op without batch dimensions to one batch element after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

Arrays = Sequence[jax.Array]


def map_batch(function: Callable[..., Any], operands: Arrays, dims: Sequence[int | None]) -> Any:
    """Applies `function` to one batch element after another. The results are batched at 0."""
    batched = [jax.numpy.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)
               if d is not None]  # fmt: skip

    def one(elements):
        remaining = iter(elements)
        return function(*(x if d is None else next(remaining)
                          for x, d in zip(operands, dims, strict=True)))  # fmt: skip

    return jax.lax.map(one, batched)


def bind_each(
    bind: Callable[..., Any], operands: Arrays, dims: Sequence[int | None], **params
) -> Any:
    """Applies bind(*operands, **params) to one batch element after another, in a batch rule.

    NOTE: it is jitted, with the static arguments as the key. An eager lax.map of a new function
    object would compile again in each call.
    """
    return _bind_each(bind, tuple(sorted(params.items())), tuple(dims), tuple(operands))


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _bind_each(bind: Callable[..., Any], params: Any, dims: Any, operands: Any) -> Any:
    return map_batch(partial(bind, **dict(params)), operands, dims)
