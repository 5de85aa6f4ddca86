"""contract: any contraction of two arrays. They are folded into matrices and multiplied.

Over Explicit mesh axes JAX has sums that are not added up: each device keeps its part. They arise
in two ways, as with jax.lax.dot_general:

    an operand is reduced       its cotangent is unreduced: each device has a part of the sum
    out_sharding is unreduced   the result is unreduced: each device multiplies its part of k

Both are computed as one product for each device. The mesh axes become a batch dimension with one
element for each device. In one operand this dimension is split off the dimension that those axes
cut. In the other operand it is split off too, or the operand is repeated along it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._ops.product import products
from jax_fp8gemm._ops.product_spec import ProductSpec
from jax_fp8gemm._ops.weights import as_matrices
from jax_fp8gemm._sharding.explicit_axes import (
    explicit_mesh,
    fold,
    reshape,
    reshaped_spec,
    reshard,
)
from jax_fp8gemm._sharding.manual_axes import settle
from jax_fp8gemm._sharding.rule import padded_spec

Dims = tuple[int, ...]
# ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as lax.dot_general's.
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]


def contract(
    op: str,
    spec: ProductSpec,
    dims: DimensionNumbers,
    lhs: jax.Array,
    rhs: jax.Array | QuantizedWeight,
    out_spec: PartitionSpec | None,
) -> jax.Array:
    """Returns an array with the batch dimensions, then the free ones of lhs, then those of rhs.

    out_spec: how Explicit mesh axes cut the result; None where no axis is Explicit.
    """
    if out_spec is None:
        return _contract_matrices(op, spec, dims, (lhs, rhs), None)
    if isinstance(rhs, QuantizedWeight):
        if out_spec.unreduced:
            raise NotImplementedError(
                f"{op}: a QuantizedWeight must not go with an unreduced out_sharding; "
                f"got {out_spec}. Pass its weight."
            )
        operands = jax.tree.map(partial(settle, op), (lhs, rhs))
        return _contract_matrices(op, spec, dims, operands, out_spec)
    if out_spec.unreduced:
        return _contract_parts(op, spec, dims, (lhs, rhs), out_spec)
    # lax.dot_general differentiates no contraction where both operands are reduced.
    operands = [lhs, rhs]
    for side in (0, 1):
        axes = jax.typeof(operands[side]).sharding.spec.reduced
        other_dim = _dim_cut_first_by(axes, operands[1 - side], dims, 1 - side)
        if other_dim is not None:
            operands[1 - side] = settle(op, operands[1 - side])
            return _contract_repeated(op, spec, dims, operands, out_spec, side, other_dim)
    return _contract_matrices(op, spec, dims, [settle(op, x) for x in operands], out_spec)


def _dim_cut_first_by(
    axes: frozenset[str], x: jax.Array, dims: DimensionNumbers, side: int
) -> int | None:
    """Returns the free dimension of `x`, operand number `side`, that `axes` cut first, or None."""
    if not axes or jax.typeof(x).sharding.spec.unreduced:
        return None
    cut = padded_spec(jax.typeof(x))
    free = _free(x, dims[0][side], dims[1][side])
    return next((dim for dim in free if frozenset(cut[dim][: len(axes)]) == axes), None)


def _contract_repeated(
    op: str,
    spec: ProductSpec,
    dims: DimensionNumbers,
    operands: list[jax.Array],
    out_spec: PartitionSpec,
    side: int,
    other_dim: int,
) -> jax.Array:
    """Contracts where operand number `side` is reduced.

    The axes that it is reduced over are the first that cut `other_dim` of the other operand.
    """
    x, other = operands[side], operands[1 - side]
    sharding = jax.typeof(x).sharding
    axes = padded_spec(jax.typeof(other))[other_dim][: len(sharding.spec.reduced)]
    num_parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
    repeated = lax.broadcast_in_dim(
        x,
        (num_parts, *x.shape),
        tuple(range(1, x.ndim + 1)),
        out_sharding=sharding.update(spec=PartitionSpec(axes, *sharding.spec.partitions)),
    )
    parts = _parts_first(other, [other_dim], [num_parts])
    new_operands = (repeated, parts) if side == 0 else (parts, repeated)
    contracting, batch = dims
    shifted = tuple(tuple(d + 1 for d in named) for named in contracting)
    new_batch = tuple((0, *(d + 1 for d in named)) for named in batch)
    # The place of the dimension that was split, in the result.
    num_batch, free = len(batch[0]), _free(other, contracting[1 - side], batch[1 - side])
    num_before = len(_free(x, contracting[side], batch[side])) if side == 0 else 0
    place = num_batch + num_before + free.index(other_dim)
    shape = _result_shape(dims, *operands)
    split_shape = (*shape[:place], num_parts, shape[place] // num_parts, *shape[place + 1 :])
    split_spec = reshaped_spec(shape, out_spec, split_shape, sharding.mesh.shape).partitions
    part_spec = PartitionSpec(split_spec[place], *split_spec[:place], *split_spec[place + 1 :])
    out = contract(op, spec, (shifted, new_batch), *new_operands, part_spec)  # pyright: ignore
    return reshard(reshape(jnp.moveaxis(out, 0, place), shape), out_spec)


def _contract_parts(
    op: str,
    spec: ProductSpec,
    dims: DimensionNumbers,
    operands: Sequence[jax.Array],
    out_spec: PartitionSpec,
) -> jax.Array:
    """Contracts where the result is unreduced over the axes that cut contracting dimensions."""
    (lhs_contract, rhs_contract), batch = dims
    lhs, rhs = (settle(op, x) for x in operands)
    mesh = jax.typeof(lhs).sharding.mesh
    cut = padded_spec(jax.typeof(lhs))
    axes = [cut[dim] for dim in lhs_contract]
    counts = [math.prod(mesh.shape[axis] for axis in names) for names in axes]
    lhs, rhs = _parts_first(lhs, lhs_contract, counts), _parts_first(rhs, rhs_contract, counts)
    first = len(counts)
    shifted = tuple(tuple(d + first for d in named) for named in (lhs_contract, rhs_contract))
    new_batch = tuple((*range(first), *(d + first for d in named)) for named in batch)
    part_spec = PartitionSpec(*(names or None for names in axes), *out_spec.partitions)
    out = contract(op, spec, (shifted, new_batch), lhs, rhs, part_spec)  # pyright: ignore
    # Each device has one element of these dimensions, so it adds nothing.
    return lax.reduce_sum(out, tuple(range(first)), out_sharding=NamedSharding(mesh, out_spec))


def _parts_first(x: jax.Array, dims: Sequence[int], counts: Sequence[int]) -> jax.Array:
    """Splits each of these dimensions into parts; the dimensions that number them come first."""
    for place, (dim, count) in enumerate(zip(dims, counts, strict=True)):
        dim += place
        shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
        x = jnp.moveaxis(reshape(x, shape), dim, place)
    return x


def _contract_matrices(
    op: str,
    spec: ProductSpec,
    dims: DimensionNumbers,
    operands: Sequence[Any],
    out_spec: PartitionSpec | None,
) -> jax.Array:
    """Brings lhs to (*batch, ..., k) and rhs to (*batch, k, n), multiplies, restores the shape."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    lhs, rhs = operands
    lhs_free, rhs_free = _free(lhs, lhs_contract, lhs_batch), _free(rhs, rhs_contract, rhs_batch)
    shape = _result_shape(dims, lhs, rhs)
    each = lambda dims: [(d,) for d in dims]
    lhs = fold(lhs, *each(lhs_batch), *(each(lhs_free) or [()]), lhs_contract)
    if isinstance(rhs, QuantizedWeight):
        rhs = as_matrices(op, "rhs", rhs, rhs_contract, rhs_batch)
    else:
        rhs = fold(rhs, *each(rhs_batch), rhs_contract, rhs_free)
    folded_spec = None
    if out_spec is not None:
        mesh = explicit_mesh((lhs, rhs))
        assert mesh is not None
        folded_spec = reshaped_spec(shape, out_spec, (*lhs.shape[:-1], rhs.shape[-1]), mesh.shape)
    out = products(spec, lhs, rhs, len(lhs_batch), folded_spec)
    return reshard(reshape(out, shape), out_spec)


def _result_shape(dims: DimensionNumbers, lhs: Any, rhs: Any) -> tuple[int, ...]:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    lhs_dims = (*lhs_batch, *_free(lhs, lhs_contract, lhs_batch))
    rhs_dims = _free(rhs, rhs_contract, rhs_batch)
    return *(lhs.shape[d] for d in lhs_dims), *(rhs.shape[d] for d in rhs_dims)


def _free(x: Any, contract: Dims, batch: Dims) -> Dims:
    return tuple(d for d in range(x.ndim) if d not in contract and d not in batch)
