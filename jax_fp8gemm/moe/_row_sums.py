"""Sums over the rows of a token, and over the elements of a row.

Additions follow one another, because a reduction would leave their order to XLA. Whether XLA makes
one operation of a product and a sum is still its choice. With batch_invariant it does not matter:
each product that is added is exact. An f32 factor is split into two of 12 bits for that, so that
its product with bf16, f16 or another such half has up to 24 bits. Terms are added in the order of
the first factor's halves, and then of the second one's. Products below 2^-126 are outside of this.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.kept_rounding import exact_f32, halves, rounded
from jax_fp8gemm.moe._choices import take_rows

_BLOCK = 128


def sum_of_rows(
    rows: jax.Array,
    order: jax.Array,
    weights: Sequence[jax.Array] | None,
    has_row: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike,
    batch_invariant: bool,
) -> jax.Array:
    """Returns the sums over j of weights[j] * rows[order[:, j]], in f32, rounded to `dtype`.

    weights: a factor (m,) of the rows of each j; None stands for ones. has_row: whether to add the
      term (i, j); None adds all.
    """
    chosen = (take_rows(rows, column) for column in order.T)
    split = functools.partial(_exact_pieces, batch_invariant=batch_invariant)
    if weights is None:
        upcast = exact_f32 if batch_invariant else lambda x: x.astype(jnp.float32)
        terms = [[upcast(x)] for x in chosen]
    else:
        pairs = zip(chosen, weights, strict=True)
        terms = [
            [x * w[:, None] for x in split(row) for w in split(column)] for row, column in pairs
        ]
    if has_row is not None:
        zero = lambda has, x: jnp.where(has[:, None], x, 0)
        pairs = zip(terms, has_row.T, strict=True)
        terms = [[zero(has, x) for x in of_choice] for of_choice, has in pairs]
    out = functools.reduce(jnp.add, [x for of_choice in terms for x in of_choice])
    return rounded(out, dtype) if batch_invariant else out.astype(dtype)


def dots_of_rows(
    rows: jax.Array,
    order: jax.Array,
    dout: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
    batch_invariant: bool,
) -> jax.Array:
    """Returns the sums (m, top_k) over the elements of rows[order] * dout, for dout (m, d)."""
    x, y = take_rows(rows, order), dout[:, None]
    if not batch_invariant:
        products = x.astype(jnp.float32) * y.astype(jnp.float32)
        return jnp.sum(products, axis=2).astype(dtype)
    if dout.shape[1] == 0:
        return jnp.zeros(x.shape[:2], dtype)
    blocks = [list(_exact_pieces(z, batch_invariant=True)) for z in (x, y)]
    blocks = [[_in_blocks(piece) for piece in pieces] for pieces in blocks]
    pairs = [(a, b) for a in blocks[0] for b in blocks[1]]
    number = range(pairs[0][0].shape[-2])
    out = functools.reduce(jnp.add, [a[..., i, :] * b[..., i, :] for i in number for a, b in pairs])
    while out.shape[-1] > 1:
        half = out.shape[-1] // 2
        out = out[..., :half] + out[..., half:]
    return rounded(out[..., 0], dtype)


def _exact_pieces(x: jax.Array, batch_invariant: bool) -> Iterator[jax.Array]:
    """Yields f32 numbers whose sum is x; if batch_invariant, their products are exact."""
    if not batch_invariant:
        yield x.astype(jnp.float32)
    elif x.dtype == jnp.float32:
        yield from halves(x)
    else:
        yield exact_f32(x)


def _in_blocks(x: jax.Array) -> jax.Array:
    """Returns x (..., d) as (..., blocks, 128), completed with zeros."""
    *leading, d = x.shape
    padding = [(0, 0)] * len(leading) + [(0, -d % _BLOCK)]
    return jnp.pad(x, padding).reshape(*leading, (d + _BLOCK - 1) // _BLOCK, _BLOCK)
