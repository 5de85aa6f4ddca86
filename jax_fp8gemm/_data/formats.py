"""Formats: the dtypes, scale blocks and implementations that an op takes."""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

SCALE_BLOCK = 128
BLOCKS = ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))
FP8_DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
# What an op quantises, and what a differentiable product returns.
FLOAT_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
# What a product of quantised operands returns.
OUT_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))

Implementation = Literal["cuda", "xla", "emulate"] | None
IMPLEMENTATIONS = (None, "cuda", "xla", "emulate")


def num_blocks(extent: int) -> int:
    """Returns the number of scale blocks that cover `extent` elements; the last may be ragged."""
    return -(-extent // SCALE_BLOCK)


def scale_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scale that belongs to values of `shape` (..., r, c)."""
    *batch, rows, columns = shape
    return (*batch, rows if block[0] == 1 else num_blocks(rows), num_blocks(columns))
