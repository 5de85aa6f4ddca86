"""Operands whose rows are padded: what each mode returns, and products without padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference

import jax_fp8gemm as jf
from jax_fp8gemm._primitives.gemm import gemm
from jax_fp8gemm._primitives.quantize import quantize_in_mode
from jax_fp8gemm._tuning import quantize_config

SQUARE = (128, 128)
MODES = quantize_config.MODES
# Within one block, one past it, whole blocks along m or k only, and rows of an odd length.
SHAPES = ((3, 5), (129, 130), (128, 200), (72, 256), (257, 562), (130, 384))


def with_special_blocks(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Returns normal values. The last block holds a NaN, and the first block an Inf."""
    x = np.random.default_rng(shape).standard_normal(shape, np.float32).astype(dtype)
    x[..., -1, -1] = np.nan
    x[..., 0, 0] = np.inf
    return x


def quantized(x: jax.Array, mode: str, **how) -> list[jax.Array]:
    """Returns the arrays of a padded quantisation."""
    return jax.tree.leaves(quantize_in_mode(x, mode, padded=True, **how))


def expected(x: np.ndarray, mode: str, **how) -> list[np.ndarray]:
    """Returns what `quantized` returns for x (m, k): values, then scales, of each result."""
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
        "block_transposed": transposed,
        "block_both": [values[:m], scale, values.T[:k]],
        "row_block_transposed": rows + transposed,
    }[mode]


def assert_batches_are_independent(mode: str, rows: int, implementation: str) -> None:
    """Elements of a batch, by vmap and by a leading dimension, have the bits of single calls."""
    x = jax.random.normal(jax.random.key(0), (3, rows, 200), jnp.bfloat16)
    how = dict(dtype=jnp.float8_e4m3fn, pow2_scale=False, implementation=implementation)
    run = functools.partial(quantized, mode=mode, **how)
    mapped, leading = jax.jit(jax.vmap(run))(x), jax.jit(run)(x)
    for i in range(3):
        for one, a, b in zip(run(x[i]), mapped, leading, strict=True):
            b = b if b.shape[0] == 3 else jnp.moveaxis(b, 1, 0)  # columns: the batch is behind k
            reference.assert_same_bits(a[i], one, "vmap")
            reference.assert_same_bits(b[i], one, "leading dimension")


def unpadded_products(x, w, dout, implementation: str, column_block=(1, 128)) -> list[jax.Array]:
    """Returns the three products of matmul, of operands that the public quantisers return.

    column_block: the scale block of x in the gradient of w.
    """
    how = dict(implementation=implementation)
    product = functools.partial(gemm, out_dtype=jnp.bfloat16, **how)
    square = jf.quantize(w, block=SQUARE, with_transpose=True, **how)
    x_rows, x_columns = jf.quantize_both(x, **how)
    if column_block == SQUARE:
        x_columns = jf.quantize(x, block=SQUARE, with_transpose="only", **how).T
    dout_rows, dout_columns = jf.quantize_both(dout, **how)
    return [
        product(x_rows, square.T),
        product(dout_rows, square),
        product(x_columns, dout_columns),
    ]


def assert_padded(x: np.ndarray, mode: str, implementation: str, **how) -> None:
    names = dict(dtype=how["fmt"], pow2_scale=how["pow2"], implementation=implementation)
    found = jax.jit(lambda x: quantized(x, mode, **names))(jnp.asarray(x))
    for i, (actual, wanted) in enumerate(zip(found, expected(x, mode, **how), strict=True)):
        reference.assert_same_bits(actual, wanted, f"{mode} {x.shape} array {i}")
