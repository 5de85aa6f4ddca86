"""Weights laid out in pieces, which a mesh may cut between features: converters and checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.formats import SCALE_BLOCK
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array
from jax_fp8gemm._primitives.gated import in_pieces, without_pieces
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def gate_up_to_pieces(
    w: Float[Array, "*batch two_f"] | ScaledArray, pieces: int
) -> Float[Array, "*batch two_f"] | ScaledArray:
    """Lays out gate | up in pieces: [gate_0 | up_0 | gate_1 | up_1 | ...].

    Piece i holds gate and up of the features i f / pieces to (i + 1) f / pieces - 1. So a mesh axis
    of as many devices leaves both of a feature on one device. The functions of this module read it
    with gate_up_pieces, where f / pieces is a multiple of 128. Nothing in the result marks its
    layout, so they need that argument. No value changes, and no scale.

    Args:
      w: (..., 2 f): w_gate_up, its bias, a gradient, or a moment of an optimiser. Or a ScaledArray
        with block (128, 128), where f / pieces must be a multiple of 128. Quantise a
        QuantizedWeight afterwards.
      pieces: the number of pieces, a divisor of f. 1 changes nothing.
    Returns:
      What `w` is, with its last dimension in the new order, sharded as before.
    Raises:
      TypeError: w is no array, or pieces no int. ValueError: pieces does not divide f, or a scale
        block spans two pieces.
    """
    return _converted("gate_up_to_pieces", in_pieces, w, pieces)


def gate_up_from_pieces(
    w: Float[Array, "*batch two_f"] | ScaledArray, pieces: int
) -> Float[Array, "*batch two_f"] | ScaledArray:
    """Returns gate | up of `w`, which gate_up_to_pieces laid out in so many pieces.

    Args, Raises: as for gate_up_to_pieces.
    """
    return _converted("gate_up_from_pieces", without_pieces, w, pieces)


def _converted(op: str, convert: Callable[..., jax.Array], w: Any, pieces: Any) -> Any:
    w = arrays.as_array(w)
    is_scaled = isinstance(w, ScaledArray)
    if not is_scaled:
        checks.check_array(op, "w", w)
    else:
        check_scaled_array(op, "w", w)
        if w.block != (SCALE_BLOCK, SCALE_BLOCK):
            raise ValueError(f"{op}: w.block must be (128, 128); got {w.block}")
    checks.check_min_ndim(op, "w", w, 1, "(..., 2 f)")
    unit = SCALE_BLOCK if is_scaled else 1
    pieces = _checked(op, {"w": w}, {"pieces": pieces}, unit)

    def along(dim: int, x: jax.Array) -> jax.Array:
        run = partial(convert, pieces=pieces, dim=x.ndim + dim)
        return with_auto_axes(run, [x], lambda: jax.typeof(x).sharding.spec)

    if not is_scaled:
        return along(-1, jnp.asarray(w))
    values = None if w.values is None else along(-1, w.values)
    turned = None if w.transposed is None else along(-2, w.transposed)
    # The scale belongs to the values or, without them, to the transposed values.
    return ScaledArray(values, along(-2 if values is None else -1, w.scale), turned, w.block)


def check_pieces(op: str, name: str, w: Any, pieces: Any) -> int:
    """Returns the number of pieces that w (..., 2 f) is laid out in; raises unless it can be."""
    checks.check_static(op, gate_up_pieces=pieces)
    return _checked(op, {name: w}, {"gate_up_pieces": pieces}, SCALE_BLOCK)


def _checked(op: str, weight: dict[str, Any], argument: dict[str, Any], unit: int) -> int:
    ((name, w),), ((of_pieces, given),) = weight.items(), argument.items()
    pieces = checks.as_index(given)
    if pieces is None or isinstance(given, bool):
        raise TypeError(f"{op}: {of_pieces} must be an int; got {checks.short_repr(given)}")
    divisor = 2 * pieces * (unit if pieces != 1 else 1)
    if pieces < 1 or w.shape[-1] % divisor:
        parts = "parts of multiples of 128" if unit > 1 else "equal parts"
        raise ValueError(
            f"{op}: {of_pieces} must divide the f features of {name} (..., 2 f) into {parts}; "
            f"got {of_pieces} {pieces}, {name} {checks.short_type(w)}"
        )
    return pieces
