"""The kernel of the weighted gradient of SwiGLU: the bits of that of weighted dh, and its dots."""

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import weighted_swiglu_cases as cases
from gated_activations import NAMES, OTHERS
from gpu_cases import E4M3, E5M2, assert_same
from test_grouped_gpu import SIZES
from test_swiglu_gpu import (
    EDGES,
    FIRST_ROW,
    PAIRED_F,
    PAIRED_M,
    PAIRED_SIZES,
    WIDTHS,
    M,
    _assert_same_rows,
    _is_of_group,
    _zeros_of_no_group,
)

from jax_fp8gemm._primitives.swiglu_quantize import swiglu_grad_quantize
from jax_fp8gemm._primitives.weighted_swiglu_grad import weighted_swiglu_grad_quantize

pytestmark = pytest.mark.gpu

activations = pytest.mark.parametrize("activation", ("silu", *OTHERS), ids=("silu", *NAMES))
dtypes = pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))


def _quantize(operands, sizes=EDGES, fmt=E4M3, *, activation="silu", with_columns=True):
    how = dict(dtype=fmt, pow2_scale=fmt == E5M2, implementation=gpu_cases.IMPLEMENTATION)
    arrays = map(jnp.asarray, operands)
    of_groups = cases.groups(sizes, FIRST_ROW)
    how |= dict(activation=activation, with_columns=with_columns)
    return weighted_swiglu_grad_quantize(*arrays, *of_groups, **how)


def _check(operands, sizes, fmt=E4M3, activation="silu", with_columns=True):
    """Rows and columns have the bits of the gradient of weighted dh; returns the dots."""
    gate_up, dh, weights = operands
    rows, columns, dots = _quantize(
        operands, sizes, fmt, activation=activation, with_columns=with_columns
    )
    expected_rows, expected = swiglu_grad_quantize(
        jnp.asarray(gate_up),
        jnp.asarray(cases.weighted(dh, weights)),
        *cases.groups(sizes, FIRST_ROW),
        activation=activation,
        with_columns=with_columns,
        dtype=fmt,
        pow2_scale=fmt == E5M2,
        implementation=gpu_cases.IMPLEMENTATION,
    )
    _assert_same_rows(rows, expected_rows, sizes)
    if with_columns:
        assert_same(columns.values, expected.values)
        assert_same(columns.scale, expected.scale)
    return dots


@activations
@dtypes
@pytest.mark.parametrize("f", WIDTHS)
@pytest.mark.parametrize("with_columns", (False, True), ids=("row", "row_column"))
def test_it_is_the_gradient_of_weighted_dh(activation, dtype, f, with_columns):
    _check(cases.operands(M, f, dtype), EDGES, activation=activation, with_columns=with_columns)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("f,dtype", [(200, jnp.bfloat16), (77, jnp.float32)])
def test_groups_of_any_sizes(sizes, f, dtype):
    _check(cases.operands(M, f, dtype), sizes, E5M2)


@activations
@pytest.mark.parametrize("mode", ("row", "row_column"))
def test_tiles_in_pairs(activation, mode):
    """Rows, columns and dots where a CTA takes tiles of dgate and of dup in pairs."""
    gate_up, dh, weights = operands = cases.operands(PAIRED_M, PAIRED_F, jnp.bfloat16)
    with_columns = mode == "row_column"
    _check(operands, PAIRED_SIZES, activation=activation, with_columns=with_columns)
    of_groups = cases.groups(PAIRED_SIZES, FIRST_ROW)
    dots = cases.partial_dots(operands, of_groups, gpu_cases.IMPLEMENTATION, activation, mode)
    is_of_group = _is_of_group(PAIRED_SIZES, PAIRED_M)
    cases.assert_dots(dots, gate_up, dh, activation, is_of_group)


@activations
@dtypes
@pytest.mark.parametrize("f", WIDTHS)
@pytest.mark.parametrize("mode", ("row", "row_column"))
def test_dots_are_those_of_float64(activation, dtype, f, mode):
    gate_up, dh, weights = operands = cases.operands(M, f, dtype)
    of_groups = cases.groups(EDGES, FIRST_ROW)
    dots = cases.partial_dots(operands, of_groups, gpu_cases.IMPLEMENTATION, activation, mode)
    cases.assert_dots(dots, gate_up, dh, activation, _is_of_group(EDGES))


@activations
@dtypes
@pytest.mark.parametrize("f", (200, 77))
@pytest.mark.parametrize("mode", ("row", "row_column"))
def test_dots_have_the_bits_of_the_emulation(activation, dtype, f, mode):
    operands = cases.operands(400, f, dtype)
    of_groups = cases.groups((100, 0, 200), FIRST_ROW)
    found, expected = (
        cases.partial_dots(operands, of_groups, implementation, activation, mode)
        for implementation in (gpu_cases.IMPLEMENTATION, "emulate")
    )
    rows = slice(FIRST_ROW, FIRST_ROW + 300)
    reference.assert_same_bits(found[:, rows], expected[:, rows])


def test_rows_of_no_group_reach_nothing():
    operands = cases.operands(M, 384, jnp.bfloat16)
    poisoned = [x.copy() for x in operands]
    for x in poisoned:
        x[~_is_of_group(EDGES)] = np.nan
    rows, columns, dots = _quantize(operands)
    same_rows, same_columns, same_dots = _quantize(poisoned)
    _assert_same_rows(same_rows, rows, EDGES)
    assert_same(same_columns.values, columns.values)
    assert_same(same_columns.scale, columns.scale)
    is_of_group = _is_of_group(EDGES)
    assert_same(same_dots[is_of_group], dots[is_of_group])


def test_bits_repeat():
    """Over runs that reuse addresses, so that a recorded CUDA graph is replayed."""
    operands = list(map(jnp.asarray, cases.operands(2048, 2880, jnp.bfloat16)))

    @jax.jit
    def run(sizes, *xs):
        rows, columns, dots = _quantize(xs, sizes)
        return _zeros_of_no_group(sizes, rows.values, rows.scale, dots[:, None]), columns

    layouts = [jnp.asarray(SIZES[name], jnp.int32) for name in ("edges", "aligned", "negative")]
    first = [run(sizes, *operands) for sizes in layouts]
    for _ in range(100):
        for sizes, expected in zip(layouts, first, strict=True):
            jax.tree.map(assert_same, run(sizes, *operands), expected)
