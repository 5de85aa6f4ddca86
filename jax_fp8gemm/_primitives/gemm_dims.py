"""The dimensions of gemm_p's operands, what jax.vmap adds to them, and how they become matrices.

    lhs, its scale   (*batch, *m, *k)
    rhs, its scale   (*batch, n, *k)
    accum, result    (*batch, *m, n)

num_k_dims says how many dimensions k has; the other counts follow from the ranks of lhs and rhs.
There is one product for each element of the batch dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from jax_fp8gemm._data.formats import SCALE_BLOCK, num_blocks
from jax_fp8gemm._data.split_k import count_parts
from jax_fp8gemm._primitives.batch import Arrays, bind_each, map_batch


def num_batch_dims(rhs, num_k_dims: int) -> int:
    """Returns the number of batch dimensions. rhs has one dimension n besides them and k."""
    return rhs.ndim - 1 - num_k_dims


def matrix_shapes(operands, num_k_dims: int) -> list[tuple[int, int]]:
    """Returns the shapes of the operands of one product as matrices."""
    first = num_batch_dims(operands[2], num_k_dims)
    num_columns = [num_k_dims] * 4 + [1] * (len(operands) - 4)
    return [
        (math.prod(x.shape[first:-count]), math.prod(x.shape[-count:]))
        for x, count in zip(operands, num_columns, strict=True)
    ]


def num_parts(operands, num_k_dims: int, split_k: bool) -> int:
    """Returns in how many parts a product adds up k (_data/split_k.py)."""
    (m, k), _, (n, _), *_ = matrix_shapes(operands, num_k_dims)
    return count_parts(m, n, num_blocks(k)) if split_k else 1


def folded(run):
    """Returns `run`, a product of matrices, as a function of the operands of the primitive.

    `run` is told the number of parts in the place of split_k.
    """

    def run_folded(*operands, num_k_dims: int, split_k: bool, **params):
        lhs, rhs = operands[0], operands[2]
        num_batch = num_batch_dims(rhs, num_k_dims)
        batch = [math.prod(lhs.shape[:num_batch])] if num_batch else []
        shapes = matrix_shapes(operands, num_k_dims)
        matrices = [x.reshape(*batch, *shape) for x, shape in zip(operands, shapes, strict=True)]
        run_one = partial(run, num_parts=num_parts(operands, num_k_dims, split_k), **params)
        (out,) = map_batch(run_one, matrices, [0] * len(matrices)) if batch else run_one(*matrices)
        return [out.reshape(*lhs.shape[:-num_k_dims], rhs.shape[num_batch])]

    return run_folded


def batch_rule(
    bind: Callable[..., Arrays],
    operands: Arrays,
    dims: Sequence[int | None],
    *,
    num_k_dims: int,
    is_1d1d: bool,
    is_2d1d: bool,
    **params: Any,
) -> tuple[Arrays, Sequence[int]]:
    """Adds the dimension of jax.vmap to the operands, and binds gemm_p again.

    If lhs alone is batched, it gets one more dimension of rows. If rhs alone is, the new dimension
    is folded into n, but not with split_k, where n decides in how many parts a product adds up k.
    Otherwise there is one more batch dimension. The elements run one after another if accum alone
    is batched, or if a scale block of 128 rows would span two of them.
    """
    lhs_batched = any(d is not None for d in dims[:2])
    rhs_batched = any(d is not None for d in dims[2:4])
    front = lambda i, size: (
        jnp.broadcast_to(operands[i][None], (size, *operands[i].shape))
        if dims[i] is None
        else jnp.moveaxis(operands[i], dims[i], 0)
    )
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    params |= dict(num_k_dims=num_k_dims, is_1d1d=is_1d1d, is_2d1d=is_2d1d)
    is_batch = operands[2].ndim - (dims[2] is not None) > 1 + num_k_dims
    if is_batch or (rhs_batched and (lhs_batched or params["split_k"])):
        return bind(*(front(i, size) for i in range(len(operands))), **params), [0]
    n = operands[2].shape[1 if dims[2] == 0 else 0]
    # The rows that a new dimension is folded into, and whether 128 of them share a scale.
    if rhs_batched:
        folded_rows, is_square = n, not (is_1d1d or is_2d1d)
    else:
        rows = [extent for d, extent in enumerate(operands[0].shape) if d != dims[0]]
        folded_rows, is_square = rows[-num_k_dims - 1], is_2d1d
    if not (lhs_batched or rhs_batched) or (is_square and folded_rows % SCALE_BLOCK):
        return bind_each(bind, operands, dims, **params), [0]
    accum = [front(4, size)] if len(operands) == 5 else []
    if lhs_batched:
        return bind(front(0, size), front(1, size), *operands[2:4], *accum, **params), [0]
    rows = operands[0].shape[:-num_k_dims]
    rhs = (front(i, size) for i in (2, 3))
    rhs = (x.reshape(size * x.shape[1], *x.shape[2:]) for x in rhs)
    accum = [jnp.moveaxis(x, 0, -2).reshape(*rows, size * n) for x in accum]
    (out,) = bind(*operands[:2], *rhs, *accum, **params)
    return [out.reshape(*rows, size, n)], [len(rows)]
