"""Rows of FP8 copied to numbered places: problems, and NumPy's answer."""

import jax
import jax.numpy as jnp
import numpy as np
from reference import num_blocks

from jax_fp8gemm import ScaledArray
from jax_fp8gemm._primitives.copy_rows import copy_rows

# Numbers that are no row of m.
NO_ROWS = (-1, -(2**31), 2**31 - 1)


def problem(s, copies, m, k, fmt, *, share=0.7, seed=0):
    """x (s, k) and its scales, of any bits; places (s, copies) and which of m rows they name.

    But for NaN in x: XLA's CPU backend knows one of each sign, whose bits are all set.

    share: of the places that name a row, at most as many as there are rows.
    """
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (s, k), np.uint8)
    values[np.isnan(values.view(fmt).astype(np.float32))] |= 0x7F
    values = values.view(fmt)
    scale = rng.integers(0, 2**32, (s, num_blocks(k)), np.uint32).view(np.float32)
    no_rows = (*NO_ROWS, m, m + 1)
    places = rng.choice(np.int64(no_rows), s * copies).astype(np.int32)
    count = min(int(share * s * copies), m)
    rows = rng.permutation(m)[:count]
    places[rng.permutation(s * copies)[:count]] = rows
    is_named = np.zeros(m, bool)
    is_named[rows] = True
    return values, scale, places.reshape(s, copies), is_named


def run(values, scale, places, m, implementation=None):
    """By copy_rows under jit."""

    @jax.jit
    def call(values, scale, places):
        return copy_rows(ScaledArray(values, scale), places, m, implementation=implementation)

    return call(*map(jnp.asarray, (values, scale, places)))


def check(found, values, scale, places, is_named):
    """Every bit of the rows that places name, against a loop over the places."""
    m = is_named.size
    expected = [np.zeros((m, x.shape[1]), x.dtype) for x in (values, scale)]
    for i, row_places in enumerate(places):
        for place in row_places:
            if 0 <= place < m:
                expected[0][place], expected[1][place] = values[i], scale[i]
    results = zip(("values", "scale"), (found.values, found.scale), expected, strict=True)
    for name, actual, rows in results:
        assert (actual.shape, actual.dtype) == (rows.shape, rows.dtype), name
        bits = [np.ascontiguousarray(x)[is_named].view(np.uint8) for x in (actual, rows)]
        np.testing.assert_array_equal(*bits, err_msg=name)
