"""Products whose lhs has 128x128 blocks (2d1d), and what quantises their lhs: against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import SCALED_PRODUCT, assert_close
from grouped_cases import SQUARE, int32, integers, normal, patterns, powers, scaled
from jax.interpreters import partial_eval

from jax_fp8gemm import ScaledArray
from jax_fp8gemm._primitives.gemm import gemm
from jax_fp8gemm._primitives.grouped_wgrad import grouped_wgrad
from jax_fp8gemm._primitives.quantize import rows_and_columns
from jax_fp8gemm._primitives.quantize_ragged import rows_and_ragged_columns

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
ARGS = dict(dtype=E4M3, pow2_scale=False, implementation=None)


def quantized(x, block=(1, 128), fmt=E4M3):
    """By the reference, which has nothing to compile for each shape."""
    values, scale = reference.quantize(x, block, fmt=fmt)
    return ScaledArray(jnp.asarray(values), jnp.asarray(scale), None, block)


def truth(lhs, rhs):
    lhs, rhs = (reference.dequantize(x.values, x.scale, x.block) for x in (lhs, rhs))
    return lhs @ rhs.T


@pytest.mark.parametrize("m, n, k", [(40, 24, 300), (300, 130, 260), (128, 1, 128), (1, 136, 16)])
def test_product_against_float64(m, n, k):
    lhs, rhs = quantized(normal(m, k), SQUARE, E5M2), quantized(normal(n, k, seed=1))
    out = gemm(lhs, rhs, jnp.float32)
    assert_close(out, truth(lhs, rhs), jnp.float32, SCALED_PRODUCT)


def test_integers_are_exact_and_accumulate():
    m, n, k = 200, 24, 400
    lhs = scaled(integers(m, k), powers(2, 4), SQUARE)
    rhs = scaled(integers(n, k, seed=1), powers(n, 4, seed=1))
    accum = integers(m, n, seed=2)
    np.testing.assert_array_equal(gemm(lhs, rhs, jnp.float32), truth(lhs, rhs))
    out = gemm(lhs, rhs, jnp.float32, None, jnp.asarray(accum))
    np.testing.assert_array_equal(out, truth(lhs, rhs) + accum)


# m = 24: a 128x128 block would span two elements.
@pytest.mark.parametrize("m", [24, 256])
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_vmap(in_axes, m):
    pairs = [
        (quantized(normal(m, 300, seed=i), SQUARE), quantized(normal(8, 300, seed=9 + i)))
        for i in range(3)
    ]
    stack = lambda i, axis: (
        pairs[0][i]
        if axis is None
        else jax.tree.map(lambda *x: jnp.stack(x), *(p[i] for p in pairs))
    )
    lhs, rhs = (stack(i, axis) for i, axis in enumerate(in_axes))
    out = jax.vmap(lambda lhs, rhs: gemm(lhs, rhs, jnp.float32), in_axes)(lhs, rhs)
    for i in range(3):
        of = lambda side, i=i: pairs[0 if in_axes[side] is None else i][side]
        assert_close(out[i], truth(of(0), of(1)), jnp.float32, SCALED_PRODUCT)


@patterns
def test_grouped_against_float64(m, sizes):
    lhs, rhs = normal(m, 140), normal(m, 24, seed=1)
    columns = [
        ScaledArray(*map(jnp.asarray, reference.quantize_ragged(x, sizes, block=b)), None, b)
        for x, b in ((lhs, SQUARE), (rhs, (1, 128)))
    ]
    out = grouped_wgrad(*columns, int32(sizes), jnp.float32)
    expected = reference.grouped_wgrad(lhs, rhs, sizes, lhs_block=SQUARE)
    assert_close(out, expected, jnp.float32, SCALED_PRODUCT)


@pytest.mark.parametrize("shape", [(200, 140), (3, 256, 140), (2, 72, 20)])
def test_rows_and_square_columns_of_arrays(shape):
    x = normal(*shape)
    x, run = jnp.asarray(x), lambda x: rows_and_columns(x, SQUARE, **ARGS)
    # With leading dimensions the columns of a matrix are those of its element of the batch.
    rows, columns = run(x) if x.ndim == 2 else jax.vmap(run)(x)
    x = np.asarray(x)
    for i in np.ndindex(shape[:-2]):
        values, scale = reference.quantize(x[i])
        reference.assert_same_bits(rows.values[i], values)
        reference.assert_same_bits(rows.scale[i], scale)
        values, scale = reference.quantize(x[i].T, SQUARE)
        reference.assert_same_bits(columns.values[i], values)
        reference.assert_same_bits(columns.scale[i], scale)
    assert (rows.block, columns.block) == ((1, 128), SQUARE)


def test_columns_of_leading_dimensions_are_those_of_one_matrix():
    x = normal(3, 256, 140)
    _, columns = rows_and_columns(jnp.asarray(x), SQUARE, **ARGS)
    values, scale = reference.quantize(x.reshape(-1, 140).T, SQUARE)
    assert columns.values.shape == (140, 3, 256) and columns.scale.shape == (2, 3, 2)
    reference.assert_same_bits(columns.values.reshape(140, -1), values)
    reference.assert_same_bits(columns.scale.reshape(2, -1), scale)


@pytest.mark.parametrize("first_row", [0, 7])
@patterns
def test_ragged_square_columns(m, sizes, first_row):
    x = normal(m, 140)
    operands = jnp.asarray(x), int32(sizes), jnp.full((1,), first_row, jnp.int32)
    rows, columns = rows_and_ragged_columns(*operands, SQUARE, **ARGS)
    values, scale = reference.quantize(x)
    reference.assert_same_bits(rows.values, values)
    values, scale = reference.quantize_ragged(x, sizes, first_row=first_row, block=SQUARE)
    reference.assert_same_bits(columns.values, values)
    reference.assert_same_bits(columns.scale, scale)
    assert columns.block == SQUARE


def test_a_bad_value_makes_its_block_nan_and_no_other():
    x, sizes = np.ones((270, 140), np.float32), (60, 130, 80)
    x[70, 7] = np.inf
    first_row = jnp.zeros((1,), jnp.int32)
    _, columns = rows_and_ragged_columns(jnp.asarray(x), int32(sizes), first_row, SQUARE, **ARGS)
    expected = np.zeros(columns.shape, bool)
    expected[:128, 128:256] = True  # rows 60 to 187
    np.testing.assert_array_equal(np.isnan(columns.dequantize()), expected)


@pytest.mark.parametrize("kept, mode", [(0, "row"), (1, "block_transposed")])
def test_an_unused_direction_is_not_computed(kept, mode):
    both = functools.partial(rows_and_ragged_columns, column_block=SQUARE, **ARGS)
    run = lambda *operands: both(*operands)[kept]
    closed = jax.make_jaxpr(run)(jnp.ones((8, 128)), int32([8]), int32([0]))
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))
    assert jaxpr.eqns[-1].params["mode"] == mode
