"""Weighted sums of numbered rows: problems, and NumPy's answer."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8gemm._primitives.sum_rows import sum_rows

# Numbers that are no row.
NO_ROWS = (-1, -(2**31), 2**31 - 1)


def problem(m, k, s, c, dtype, *, share=0.5, seed=0):
    """rows (m, k), places (s, c) of which `share` are rows, weights (s, c) of either sign.

    Rows that no place names are NaN. Some elements are zeros of either sign.
    """
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((m, k)).astype(dtype)
    rows[rng.random((m, k)) < 0.1] = -0.0
    is_row = rng.random((s, c)) < share
    places = np.where(is_row, rng.integers(0, m, (s, c)), rng.choice(NO_ROWS, (s, c)))
    places = places.astype(np.int32)
    rows[np.setdiff1d(np.arange(m), places)] = np.nan
    weights = rng.standard_normal((s, c)).astype(np.float32)
    return rows, places, weights


def expected(rows, places, weights):
    """Each product rounded to f32, added in f32 in the order of the places."""
    m, k = rows.shape
    sums = np.full((places.shape[0], k), -0.0, np.float32)
    for column, factor in zip(places.T, weights.T, strict=True):
        is_row = (column >= 0) & (column < m)
        terms = rows[np.where(is_row, column, 0)].astype(np.float32) * factor[:, None]
        sums = sums + np.where(is_row[:, None], terms, np.float32(0))
    return (sums if places.shape[1] else np.abs(sums)).astype(rows.dtype)


def run(rows, places, weights, implementation=None):
    """By sum_rows under jit."""
    call = jax.jit(lambda *operands: sum_rows(*operands, implementation=implementation))
    return call(*map(jnp.asarray, (rows, places, weights)))
