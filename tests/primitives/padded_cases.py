"""Quantised operands whose rows are padded: what each mode returns, by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import reference

from jax_fp8gemm._primitives.quantize import quantize_in_mode
from jax_fp8gemm._tuning import quantize_config

SQUARE = (128, 128)
MODES = quantize_config.MODES
# Within one block, one past it, whole blocks along m or k only, and rows of an odd length.
SHAPES = ((3, 5), (129, 130), (128, 200), (72, 256), (257, 562), (130, 384))


def with_special_blocks(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Normal values, of which the last block holds a NaN and another one an Inf."""
    x = np.random.default_rng(shape).standard_normal(shape, np.float32).astype(dtype)
    x[..., -1, -1] = np.nan
    x[..., 0, 0] = np.inf
    return x


def quantized(x: jax.Array, mode: str, **how) -> list[jax.Array]:
    """The arrays of a padded quantisation."""
    return jax.tree.leaves(quantize_in_mode(x, mode, padded=True, **how))


def expected(x: np.ndarray, mode: str, **how) -> list[np.ndarray]:
    """Of x (m, k): values, then scales, of each result, as `quantized` returns them."""
    ends = [(0, -extent % 128) for extent in x.shape]
    m, k = x.shape
    filled = np.pad(x, ends)  # a row or column of zeros changes no scale

    def along(axis, block=(1, 128)):
        values, scale = reference.quantize(filled, block, axis, **how)
        rows = m if axis == -1 else k
        return [values[:rows], scale[:rows] if block == (1, 128) else scale]

    rows, columns = along(-1), along(-2)
    values, scale = reference.quantize(filled, SQUARE, **how)
    transposed = [values.T[:k], scale.T]
    return {
        "row": rows,
        "column": columns,
        "row_column": rows + columns,
        "block": [values[:m], scale],
        "block_transposed": [values.T[:k], scale.T],
        "block_both": [values[:m], scale, values.T[:k]],
        "row_block_transposed": rows + transposed,
    }[mode]


def assert_padded(x: np.ndarray, mode: str, implementation: str, **how) -> None:
    names = dict(dtype=how["fmt"], pow2_scale=how["pow2"], implementation=implementation)
    found = jax.jit(lambda x: quantized(x, mode, **names))(jnp.asarray(x))
    for i, (actual, wanted) in enumerate(zip(found, expected(x, mode, **how), strict=True)):
        reference.assert_same_bits(actual, wanted, f"{mode} {x.shape} array {i}")
