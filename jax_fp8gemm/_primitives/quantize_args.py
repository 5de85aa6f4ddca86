"""QuantizeArgs: the static arguments of all quantisers, and what their primitives share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_fp8gemm._data.formats import SCALE_BLOCK, Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray


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


def bind_args(mode: str, args: QuantizeArgs) -> dict[str, Any]:
    """Returns the keyword arguments with which a primitive is bound in this mode."""
    return dict(
        mode=mode,
        e5m2=jnp.dtype(args["dtype"]) == jnp.float8_e5m2,
        pow2_scale=bool(args["pow2_scale"]),
        implementation=args["implementation"],
    )


# The modes with columns, by whether the columns have 128x128 blocks.
_COLUMNS = {False: "column", True: "block_transposed"}
_ROWS_AND_COLUMNS = {False: "row_column", True: "row_block_transposed"}


def columns_mode(block: tuple[int, int], *, with_rows: bool) -> str:
    """Returns the mode whose columns have this scale block; its rows have (1, 128)."""
    return (_ROWS_AND_COLUMNS if with_rows else _COLUMNS)[block == (SCALE_BLOCK, SCALE_BLOCK)]


def split_mode(mode: str) -> tuple[str | None, str | None]:
    """Returns the modes that give the rows of a mode alone, and its columns alone."""
    for is_square, both in _ROWS_AND_COLUMNS.items():
        if mode == both:
            return "row", _COLUMNS[is_square]
    return ("row", None) if mode == "row" else (None, mode)


def has_square_columns(mode: str) -> bool:
    """Returns whether the columns of a mode have 128x128 blocks."""
    return mode in (_COLUMNS[True], _ROWS_AND_COLUMNS[True])


def scaled_arrays(results: Sequence[jax.Array], mode: str) -> tuple[ScaledArray, ...]:
    """Returns a ScaledArray for each pair of values and scale: of rows, of columns, or of both."""
    pairs = list(zip(results[::2], results[1::2], strict=True))
    blocks = [(1, SCALE_BLOCK)] * len(pairs)
    if has_square_columns(mode):
        blocks[-1] = (SCALE_BLOCK, SCALE_BLOCK)
    return tuple(ScaledArray(*pair, None, block) for pair, block in zip(pairs, blocks, strict=True))


def keep_used_axes(used, *, mode: str, **params) -> tuple[dict[str, Any], Sequence[int]]:
    """The dce_rule of primitives with modes of rows, of columns and of both.

    Where only rows, or only columns, of both are used, it leaves out the others.
    """
    kept = range(len(used))
    rows, columns = split_mode(mode)
    if rows and columns and not any(used[2:]):
        mode, kept = rows, (0, 1)
    elif rows and columns and not any(used[:2]):
        mode, kept = columns, (2, 3)
    return dict(params, mode=mode), kept
