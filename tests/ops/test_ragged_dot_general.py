"""ragged_dot_general: its dimension numbers and arguments, as lax's where it is to be so."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
import reference
from assertions import REORDERED, assert_diff_below
from errors import raises
from ragged_cases import (
    CONTRACTION,
    ROWS,
    SIZES,
    contraction,
    contraction_problem,
    int32,
    jitted,
    numbers,
    problem,
)

from jax_fp8gemm import BF16, quantize, ragged_dot, ragged_dot_general


@pytest.mark.parametrize(
    "kwargs, dtype", [(dict(recipe=BF16), jnp.bfloat16), (dict(precision="highest"), jnp.float32)]
)
def test_without_fp8_is_that_of_lax(kwargs, dtype):
    precision = kwargs.get("precision")
    for (lhs, rhs, _), dims in ((problem(dtype), ROWS), (contraction_problem(dtype), CONTRACTION)):
        args = (lhs, rhs, int32(SIZES))
        general = functools.partial(ragged_dot_general, ragged_dot_dimension_numbers=dims, **kwargs)
        plain = jax.lax.ragged_dot_general(*args, dims, precision=precision)
        reference.assert_same_bits(general(*args), plain)


# Dimension numbers


@pytest.mark.parametrize(
    "lhs_order, rhs_order, dims",
    [
        ((0, 1), (0, 1, 2), ROWS),
        ((0, 1), (0, 2, 1), numbers(((1,), (2,)), [0], [0])),
        ((1, 0), (1, 2, 0), numbers(((0,), (0,)), [1], [2])),
        ((0, 1), (2, 0, 1), numbers(((1,), (2,)), [0], [1])),
    ],
    ids=["m k, g k n", "m k, g n k", "k m, k n g", "m k, n g k"],
)
def test_ragged_rows_in_any_order_are_ragged_dot(lhs_order, rhs_order, dims):
    lhs, rhs, _ = problem(jnp.bfloat16)
    found = ragged_dot_general(
        lhs.transpose(lhs_order), rhs.transpose(rhs_order), int32(SIZES), dims
    )
    reference.assert_same_bits(found, ragged_dot(lhs, rhs, int32(SIZES)))


@pytest.mark.parametrize(
    "lhs_order, rhs_order, dims",
    [
        ((1, 0), (0, 1), numbers(((1,), (0,)), [1])),
        ((0, 1), (1, 0), numbers(((0,), (1,)), [0])),
        ((1, 0), (1, 0), numbers(((1,), (1,)), [1])),
    ],
    ids=["k m, m n", "m k, n m", "k m, n m"],
)
def test_contraction_in_any_order(lhs_order, rhs_order, dims):
    lhs, rhs, _ = contraction_problem(jnp.bfloat16)
    found = ragged_dot_general(
        lhs.transpose(lhs_order), rhs.transpose(rhs_order), int32(SIZES), dims
    )
    reference.assert_same_bits(found, contraction(lhs, rhs, int32(SIZES)))


def test_gradients_of_transposed_ragged_rows():
    lhs, rhs, dout = problem()
    dims = numbers(((0,), (2,)), [1], [0])  # (k, m), (g, n, k)
    product = lambda lhs, rhs: ragged_dot_general(lhs, rhs, int32(SIZES), dims)

    @jax.jit
    def vjp(lhs, rhs, dout):
        out, pullback = jax.vjp(product, lhs, rhs)
        return out, *pullback(dout)

    out, dlhs, drhs = vjp(lhs.T, rhs.mT, dout)
    expected = jitted()(lhs, rhs, int32(SIZES), dout)
    assert_diff_below(REORDERED, (out, dlhs.T, drhs.mT), expected)


def test_positional_arguments_are_those_of_lax():
    functions = (ragged_dot_general, jax.lax.ragged_dot_general)
    ours, theirs = (list(inspect.signature(f).parameters) for f in functions)
    assert ours[:8] == theirs[:8]
    lhs, rhs, _ = problem(jnp.bfloat16)
    offset, sizes = int32([1]), int32((40, *SIZES))
    found = ragged_dot_general(lhs, rhs, sizes, ROWS, None, jnp.float32, offset)
    expected = ragged_dot(lhs, rhs, sizes, None, jnp.float32, offset)
    reference.assert_same_bits(found, expected)


# Errors

LHS, RHS, DOUT, GROUPS = jnp.ones((8, 3)), jnp.ones((4, 3, 5)), jnp.ones((8, 5)), int32(SIZES)
BATCH_RAGGED = numbers(((2,), (1,)), [0], [], ((0,), (0,)))
UNSUPPORTED = (
    r"supported are ragged rows, \(m, k\), \(g, k, n\) -> \(m, n\), or a ragged contraction, "
    r"\(m, k\), \(m, n\) -> \(g, k, n\), with .*; got RaggedDot.* Map batch dimensions with "
)
BAD_CALLS = [
    (jnp.ones((4, 8, 3)), RHS, GROUPS, BATCH_RAGGED, {}, NotImplementedError, UNSUPPORTED),
    (jnp.ones((4, 8, 3)), jnp.ones((4, 3, 5, 6)), GROUPS,
     numbers(((2,), (1,)), [1], [3], ((0,), (0,))), {}, NotImplementedError, UNSUPPORTED),
    (jnp.ones((8, 3, 2)), jnp.ones((4, 3, 2, 5)), GROUPS, numbers(((1, 2), (1, 2)), [0], [0]), {},
     NotImplementedError, UNSUPPORTED),
    (jnp.ones((8, 3, 2)), DOUT, GROUPS, CONTRACTION, {}, NotImplementedError, UNSUPPORTED),
    (LHS, RHS, GROUPS, numbers(((), ()), [0], [0]), {}, NotImplementedError, UNSUPPORTED),
    (LHS, RHS, GROUPS, numbers(((1,), (1,)), [0], []), {}, TypeError,
     "lhs must have one ragged dimension, and rhs one group dimension where"),
    (LHS, RHS, GROUPS, numbers(((1,), (1,)), [], [0]), {}, TypeError,
     "lhs must have one ragged dimension"),
    (LHS, RHS, GROUPS, numbers(((1,), (1,)), [0, 1], [0]), {}, TypeError,
     "lhs must have one ragged dimension"),
    (LHS, DOUT, GROUPS, numbers(((0,), (0,)), [0], [1]), {}, TypeError,
     "lhs must have one ragged dimension"),
    (jnp.ones((4, 8, 3)), RHS, GROUPS, numbers(((2,), (1,)), [0], [2], ((0,), (0,))), {},
     TypeError, "lhs must have one ragged dimension"),
    (LHS, RHS, GROUPS, numbers(((1,), (1,)), [-2], [0]), {}, TypeError,
     "dimension numbers must name dimensions of lhs and rhs, each once; got RaggedDot"),
    (LHS, RHS, GROUPS, numbers(((1,), (3,)), [0], [0]), {}, TypeError,
     "dimension numbers must name dimensions"),
    (LHS, RHS, GROUPS, numbers(((1,), (1,)), [0], [1]), {}, TypeError,
     "dimension numbers must name dimensions"),
    (LHS, RHS, GROUPS, numbers(((1,), (2,)), [0], [0]), {}, TypeError,
     r"contracting dimensions of lhs and rhs must agree; .*, lhs f32\[8,3\], rhs f32\[4,3,5\]"),
    (LHS, DOUT[1:], GROUPS, CONTRACTION, {}, TypeError, "contracting dimensions of lhs and rhs"),
    (LHS, RHS, GROUPS, (((1,), (1,)), ((), ())), {}, TypeError,
     "ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers; got tuple"),
    (LHS, DOUT, GROUPS, CONTRACTION, dict(group_offset=int32([0])), NotImplementedError,
     r"group_offset must be None in a ragged contraction; got group_offset s32\[1\]. Slice"),
    (LHS, RHS, GROUPS[1:], ROWS, {}, TypeError, "group_sizes must have one size for each of"),
    (LHS, DOUT, GROUPS[None], CONTRACTION, {}, TypeError, r"group_sizes must be \(g,\); got"),
    (LHS, DOUT, [1, 2], CONTRACTION, {}, TypeError, "group_sizes must be an array; got list"),
    (LHS, DOUT.astype(jnp.float8_e4m3fn), GROUPS, CONTRACTION, {}, TypeError,
     r"rhs must be .*f8e4m3fn\[8,5\]"),
    (quantize(LHS), RHS, GROUPS, ROWS, {}, TypeError,
     r"lhs must be an array; got a ScaledArray f8e4m3fn\[8,3\]. ragged_dot_general quantises lhs "
     "itself: pass the array from before quantize."),
    (LHS, quantize(RHS, block=(128, 128)), GROUPS, ROWS, {}, TypeError,
     r"rhs must be an array; .* ScaledArray goes into jax_fp8gemm.ragged_dot"),
    (LHS, RHS, GROUPS, ROWS, dict(precision="fp8"), ValueError, "precision must be .*; got 'fp8'"),
    (LHS, DOUT, GROUPS, CONTRACTION, dict(implementation="cuda", recipe=BF16), ValueError,
     "implementation='cuda' must go with an FP8 recipe"),
]  # fmt: skip


@pytest.mark.parametrize("lhs, rhs, sizes, dims, kwargs, error, message", BAD_CALLS)
def test_bad_input_is_told_at_trace_time(lhs, rhs, sizes, dims, kwargs, error, message):
    with raises(error, match="ragged_dot_general: " + message):
        ragged_dot_general(lhs, rhs, sizes, dims, **kwargs)
