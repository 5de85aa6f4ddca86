"""QuantizeArgs: the static arguments of all quantisers, and what their primitives share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_fp8gemm._data.formats import SCALE_BLOCK, Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._primitives import modes

_SQUARE = (SCALE_BLOCK, SCALE_BLOCK)


class QuantizeArgs(TypedDict):
    """How an unchecked function quantises.

    Attributes:
      dtype: float8_e4m3fn or float8_e5m2.
      pow2_scale: whether each scale is rounded up to a power of two.
      implementation: None, "cuda", "xla" or "emulate".
    """

    dtype: DTypeLike
    pow2_scale: bool
    implementation: Implementation


def bind_in_mode(
    bind: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    mode: str,
    args: QuantizeArgs,
) -> tuple[ScaledArray, ...]:
    """Binds a quantiser's primitive. Returns one ScaledArray, or two: of rows and of columns."""
    results = bind(
        *operands,
        mode=mode,
        e5m2=jnp.dtype(args["dtype"]) == jnp.float8_e5m2,
        pow2_scale=bool(args["pow2_scale"]),
        implementation=args["implementation"],
    )
    if mode in modes.SQUARE:
        values, *transposed, scale = results
        return (ScaledArray(values, scale, next(iter(transposed), None), _SQUARE),)
    pairs = list(zip(results[::2], results[1::2], strict=True))
    blocks = [(1, SCALE_BLOCK)] * len(pairs)
    if modes.has_square_columns(mode):
        blocks[-1] = _SQUARE
    return tuple(ScaledArray(*pair, None, block) for pair, block in zip(pairs, blocks, strict=True))


def keep_used_axes(used, *, mode: str, **params) -> tuple[dict[str, Any], Sequence[int]]:
    """The dce_rule of primitives with modes of rows, of columns and of both.

    Where only rows, or only columns, of both are used, it leaves out the others.
    """
    kept = range(len(used))
    rows, columns = modes.split(mode)
    if rows and columns and not any(used[2:]):
        mode, kept = rows, (0, 1)
    elif rows and columns and not any(used[:2]):
        mode, kept = columns, (2, 3)
    return dict(params, mode=mode), kept
