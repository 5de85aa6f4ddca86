"""map_batch: an op without a batch dimension, for one batch element after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

Arrays = Sequence[jax.Array]


def map_batch(function: Callable[..., Any], operands: Arrays, dims: Sequence[int | None]) -> Any:
    """Applies `function` to one batch element after another; results are batched at 0."""
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
    """map_batch of bind(*operands, **params), as a batch rule needs it.

    NOTE: jitted by what is static, because an eager lax.map compiles anew what it has not seen.
    """
    return _bind_each(bind, tuple(sorted(params.items())), tuple(dims), tuple(operands))


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _bind_each(bind: Callable[..., Any], params: Any, dims: Any, operands: Any) -> Any:
    return map_batch(partial(bind, **dict(params)), operands, dims)
