"""stack, concatenate and the indexing of ScaledArrays. No value is rounded again."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.methods import define_method
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array, values_and_scale

_Join = Callable[..., jax.Array]


def stack(arrays: Sequence[ScaledArray], axis: int = 0) -> ScaledArray:
    """Joins arrays of one shape along a new leading dimension, as jnp.stack does.

    Args:
      arrays: ScaledArrays of one shape (..., r, c), one dtype and one block. The result stores the
        orientations that all of them store; its values, if there is none.
      axis: where the new dimension goes. It must lie before r and c.
    Returns:
      A ScaledArray, (..., r, c) with one dimension more.
    Raises:
      TypeError: an element is no ScaledArray.
      ValueError: they differ, or axis is wrong.
    """
    first = _check_alike("stack", arrays)
    if any(x.shape != first.shape for x in arrays):
        raise ValueError(f"stack: arrays must have one shape; got {_types(arrays)}")
    given, axis = axis, _check_axis("stack", axis, first.ndim + 1)
    if axis >= first.ndim - 1:
        raise ValueError(
            f"stack: axis must lie before the last two dimensions; got {given} for {_types(arrays)}"
        )
    return _joined(jnp.stack, arrays, axis, axis)


def concatenate(arrays: Sequence[ScaledArray], axis: int = 0) -> ScaledArray:
    """Joins arrays along a dimension that they have, as jnp.concatenate does.

    Args:
      arrays: ScaledArrays (..., r, c) of one dtype and one block, of one shape but for `axis`. The
        result stores what that of `stack` does.
      axis: the dimension. Where scale blocks of 128 lie along it, each array but the last must
        consist of whole ones.
    Returns:
      A ScaledArray.
    Raises:
      TypeError: an element is no ScaledArray.
      ValueError: they differ, axis is wrong, or a block
        would hold values of two arrays.
    """
    op = "concatenate"
    first = _check_alike(op, arrays)
    axis = _check_axis(op, axis, first.ndim)
    rests = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in arrays}
    if len(rests) > 1:
        raise ValueError(
            f"{op}: arrays must have one shape but for dimension {axis}; got {_types(arrays)}"
        )
    from_end = axis - first.ndim
    block = first.block[from_end] if from_end >= -2 else 1
    if any(x.shape[axis] % block for x in arrays[:-1]):
        raise ValueError(
            f"{op}: arrays but the last must have whole scale blocks, multiples of {block}, along "
            f"dimension {axis}; got {_types(arrays)}. Concatenate before quantize."
        )
    turned = {-1: axis - 1, -2: axis + 1}.get(from_end, axis)
    return _joined(jnp.concatenate, arrays, axis, turned)


def take(x: ScaledArray, index: Any) -> ScaledArray:
    """Returns x[index], for an index of leading dimensions: all but the last two.

    For an ellipsis it returns x itself, as w[...] reads the value of a Variable of Flax.
    """
    if index is Ellipsis:
        return x
    items = cast(tuple[Any, ...], index if isinstance(index, tuple) else (index,))
    has_ellipsis = any(item is Ellipsis for item in items)
    if has_ellipsis or sum(item is not None for item in items) > x.ndim - 2:
        raise IndexError(
            "ScaledArray: only dimensions before the last two can be indexed, or all by [...]; "
            f"got {len(items)} indices of {checks.short_type(x)}. Index the array before quantize, "
            "or what dequantize returns."
        )
    part: Callable[[jax.Array], jax.Array] = lambda leaf: leaf[index]
    return jax.tree.map(part, x)


define_method(take)


def _joined(join: _Join, arrays: Sequence[ScaledArray], axis: int, turned: int) -> ScaledArray:
    """Joins values along `axis`, and transposed values along `turned`."""
    block = arrays[0].block
    transposed = [x.transposed for x in arrays if x.transposed is not None]
    has_all = len(transposed) == len(arrays)
    if has_all and any(x.values is None for x in arrays):
        scales = [x.T.scale if x.values is not None else x.scale for x in arrays]
        return ScaledArray(None, join(scales, turned), join(transposed, turned), block)
    values, scales = zip(*map(values_and_scale, arrays), strict=True)
    also = join(transposed, turned) if has_all else None
    return ScaledArray(join(values, axis), join(scales, axis), also, block)


def _check_alike(op: str, arrays: Sequence[ScaledArray]) -> ScaledArray:
    """Returns the first of the arrays, which are ScaledArrays of one dtype, rank and block."""
    if not isinstance(arrays, list | tuple) or not arrays:
        raise TypeError(
            f"{op}: arrays must be a sequence of ScaledArrays; got {checks.short_repr(arrays)}"
        )
    for i, x in enumerate(arrays):
        check_scaled_array(op, f"arrays[{i}]", x)
    kinds = {(x.block, x.dtype, x.ndim) for x in arrays}
    if len(kinds) > 1:
        blocks = sorted({x.block for x in arrays})
        raise ValueError(
            f"{op}: arrays must have one dtype, one rank and one block; got {_types(arrays)} with "
            f"blocks {', '.join(map(str, blocks))}"
        )
    return arrays[0]


def _check_axis(op: str, axis: Any, ndim: int) -> int:
    """Returns the axis, counted from the front."""
    try:
        found = operator.index(axis)
    except TypeError:
        found = ndim
    if not -ndim <= found < ndim:
        raise ValueError(
            f"{op}: axis must be in {-ndim}..{ndim - 1}; got {checks.short_repr(axis)}"
        )
    return found % ndim


def _types(arrays: Sequence[ScaledArray]) -> str:
    return ", ".join(map(checks.short_type, arrays))
