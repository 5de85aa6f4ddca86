"""The modes of the quantisers: which scale blocks they use, and what they return.

_primitives/quantize.py and _primitives/quantize_ragged.py say what each mode means.
"""

from __future__ import annotations

from jax_fp8gemm._data.formats import SCALE_BLOCK

# The modes with 128x128 blocks alone. Their kernel takes (batch, m, k).
SQUARE = ("block", "block_transposed", "block_both")
# The modes with columns, by whether the columns have 128x128 blocks.
_COLUMNS = {False: "column", True: "block_transposed"}
_ROWS_AND_COLUMNS = {False: "row_column", True: "row_block_transposed"}


def of_columns(block: tuple[int, int], *, with_rows: bool) -> str:
    """Returns the mode whose columns have this scale block; its rows have (1, 128)."""
    return (_ROWS_AND_COLUMNS if with_rows else _COLUMNS)[block == (SCALE_BLOCK, SCALE_BLOCK)]


def split(mode: str) -> tuple[str | None, str | None]:
    """Returns the modes that give the rows of a mode alone, and its columns alone."""
    for is_square, both in _ROWS_AND_COLUMNS.items():
        if mode == both:
            return "row", _COLUMNS[is_square]
    return ("row", None) if mode == "row" else (None, mode)


def last_dims(mode: str) -> str:
    """Returns those of "m" and "k" that are last in values of the mode, for x (m, k)."""
    if mode in SQUARE:
        return {"block": "k", "block_transposed": "m", "block_both": "km"}[mode]
    rows, columns = split(mode)
    return ("k" if rows else "") + ("m" if columns else "")


def has_square_columns(mode: str) -> bool:
    """Returns whether the columns of a mode have 128x128 blocks."""
    return mode in (_COLUMNS[True], _ROWS_AND_COLUMNS[True])
