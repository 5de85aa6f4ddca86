"""Rows gathered by number and quantised: problems, and NumPy's answer."""

import jax
import jax.numpy as jnp
import numpy as np
import reference
from reference import E4M3, E5M2

from jax_fp8gemm import ScaledArray
from jax_fp8gemm._primitives.gather_quantize import gather_quantize

FP8 = (E4M3, E5M2)
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, *FP8)


def problem(dtype, s, k, m, seed=0):
    """x (s, k), a pair with its scales if it is FP8; rows (m,), some of them none; weights (m,).

    Values have a wide range, Inf and NaN among them; weights have zeros and both signs.
    """
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(s, k)) * np.exp(rng.uniform(-8, 4, (s, k)))).astype(np.float32)
    x[rng.integers(s), rng.integers(k)] = np.inf
    x[rng.integers(s), rng.integers(k)] = np.nan
    x = reference.quantize(x, fmt=dtype) if dtype in FP8 else x.astype(dtype)
    rows = rng.integers(-2, s + 2, m).astype(np.int32)
    weights = rng.normal(size=m).astype(np.float32) * (rng.random(m) < 0.9)
    return x, rows, weights


def gathered(x, rows, weights):
    """What is quantised, in f32."""
    if isinstance(x, tuple):
        values, scale = x
        x = values.astype(np.float32) * np.repeat(scale, 128, axis=1)[:, : values.shape[1]]
    y = x.astype(np.float32)[np.clip(rows, 0, len(x) - 1)]
    return y if weights is None else y * weights[:, None]


def run(x, rows, weights, sizes, first_row, mode, fmt, pow2=False, implementation=None):
    """By gather_quantize under jit."""
    x = ScaledArray(*map(jnp.asarray, x)) if isinstance(x, tuple) else jnp.asarray(x)
    groups = jnp.asarray(sizes, jnp.int32), jnp.full((1,), first_row, jnp.int32)
    how = dict(mode=mode, dtype=fmt, pow2_scale=pow2, implementation=implementation)
    weights = None if weights is None else jnp.asarray(weights)
    return jax.jit(lambda *xs: gather_quantize(*xs, **how))(x, jnp.asarray(rows), weights, *groups)


def check(x, rows, weights, sizes, first_row, mode, fmt, pow2=False, implementation=None):
    """Every bit of every result against NumPy."""
    results = run(x, rows, weights, sizes, first_row, mode, fmt, pow2, implementation)
    with np.errstate(invalid="ignore"):
        y = gathered(x, rows, weights)
        along_rows = reference.quantize(y, fmt=fmt, pow2=pow2)
        columns = reference.quantize_ragged(y, sizes, fmt, pow2, first_row)
        squares = reference.quantize_ragged(y, sizes, fmt, pow2, first_row, (128, 128))
    expected = {
        "row": [along_rows],
        "column": [columns],
        "row_column": [along_rows, columns],
        "block_transposed": [squares],
        "row_block_transposed": [along_rows, squares],
    }
    for found, (values, scale) in zip(results, expected[mode], strict=True):
        reference.assert_same_bits(found.scale, scale, "scale")
        reference.assert_same_bits(found.values, values, "values")
