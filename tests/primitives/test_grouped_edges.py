"""Grouped products of awkward operands: NaN in another group, sizes beyond int32, no rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import assert_exact
from errors import raises, without_annotation_checks
from grouped_cases import SQUARE, int32, zeros
from test_grouped_gemm import dot_f32, dot_operands, dot_truth
from test_grouped_wgrad import exact_wgrad, wgrad_operands

from jax_fp8gemm import ScaledArray, scaled_ragged_wgrad


@pytest.mark.parametrize("sizes", [(20, 0, 13), (20, 13, 0)])
def test_nan_in_a_matrix_reaches_no_other_group(sizes):
    lhs, rhs = dot_operands(40, 24, 140, 3)
    values = np.array(rhs.values)
    values.view(np.uint8)[2] = 0x7F
    bad = ScaledArray(jnp.asarray(values), rhs.scale.at[2].set(jnp.nan), None, SQUARE)
    expected = dot_truth(lhs, rhs, sizes)
    start, end = reference.row_ranges(sizes, 40)[2]
    expected[start:end] = np.nan
    assert_exact(dot_f32(lhs, bad, int32(sizes)), expected)


def test_int64_sizes():
    lhs, rhs = dot_operands(40, 24, 140, 4)
    sizes = np.array((20, -(2**40), 2**40, 5))
    with jax.enable_x64(True):
        out = dot_f32(lhs, rhs, jnp.asarray(sizes))
    assert_exact(out, dot_truth(lhs, rhs, sizes))


def test_numpy_int64_sizes_saturate_where_jax_would_wrap_them():
    lhs, rhs = dot_operands(40, 24, 140, 3)
    sizes = np.array((20, 2**32 + 1, 5))
    with without_annotation_checks():
        out = dot_f32(lhs, rhs, sizes)
    assert_exact(out, dot_truth(lhs, rhs, sizes))


@pytest.mark.parametrize("g", [1, 3])
def test_weight_gradient_of_no_rows(g):
    out = exact_wgrad(*wgrad_operands(0, 8, 8), int32([5] * g))
    assert_exact(out, np.zeros((g, 8, 8)))


def test_tokens_must_fill_their_blocks():
    with raises(ValueError, match="t must be a multiple of 128; got lhs f8e4m3fn"):
        scaled_ragged_wgrad(zeros(8, 200), zeros(8, 200), int32((200,)))
