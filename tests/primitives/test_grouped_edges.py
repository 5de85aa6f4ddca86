"""Grouped products of awkward operands: NaN in another group, sizes beyond int32, no rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import assert_exact
from errors import raises, without_annotation_checks
from grouped_cases import SQUARE, int32, zeros
from reference import assert_same_bits
from test_grouped_gemm import dot_f32, dot_operands, dot_truth
from test_grouped_wgrad import exact_wgrad, wgrad_operands

import jax_fp8gemm
from jax_fp8gemm import ScaledArray, moe, scaled_ragged_dot, scaled_ragged_wgrad


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


def _scaled(lhs, rhs, sizes):
    blocks = jax_fp8gemm.quantize(rhs.swapaxes(1, 2), block=SQUARE)
    return scaled_ragged_dot(jax_fp8gemm.quantize(lhs), blocks, sizes)


def _experts(lhs, rhs, sizes, **how):
    return moe.moe_mlp(lhs, rhs, rhs[:, :, :128], sizes, **how)


def _gradients(lhs, rhs, sizes, **how):
    loss = lambda *operands: _experts(*operands, sizes, **how).astype(jnp.float32).sum()
    return jax.grad(loss, (0, 1))(lhs, rhs)


def _with_biases(op):
    return lambda lhs, rhs, sizes: op(lhs, rhs, sizes, biases=(rhs[:, 0], rhs[:, 1, :128]))


BY_KERNELS = {
    "scaled_ragged_dot": _scaled,
    "ragged_dot": jax_fp8gemm.ragged_dot,
    "quantize_ragged": lambda lhs, rhs, sizes: jax_fp8gemm.quantize_ragged(lhs, sizes),
    "moe_mlp": _experts,
    "gradients": _gradients,
}
BY_XLA = {
    "bf16": functools.partial(jax_fp8gemm.ragged_dot, recipe="bf16"),
    "biases": _with_biases(_experts),
    "gradients of biases": _with_biases(_gradients),
}


def _matrices():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    return make(30, 128), make(4, 128, 256)


@pytest.mark.parametrize("op", (BY_KERNELS | BY_XLA).values(), ids=BY_KERNELS | BY_XLA)
def test_negative_sizes_count_as_0(op):
    operands = _matrices()
    found, expected = (op(*operands, int32(s)) for s in ((-5, 20, -(2**31), 8), (0, 20, 0, 8)))
    jax.tree.map(assert_same_bits, found, expected)


@pytest.mark.parametrize("op", BY_KERNELS.values(), ids=BY_KERNELS)
def test_no_kernel_of_xla_prepares_sizes_of_int32(op):
    """Ours read them as they are. One more would take 2 us."""
    program = jax.jit(op).trace(*_matrices(), int32((1, 2, 3, 4)))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @jax_fp8gemm" in text
    assert "stablehlo.clamp" not in text and "stablehlo.maximum" not in text


@pytest.mark.parametrize("g", [1, 3])
def test_weight_gradient_of_no_rows(g):
    out = exact_wgrad(*wgrad_operands(0, 8, 8), int32([5] * g))
    assert_exact(out, np.zeros((g, 8, 8)))


def test_tokens_must_fill_their_blocks():
    with raises(ValueError, match="t must be a multiple of 128; got lhs f8e4m3fn"):
        scaled_ragged_wgrad(zeros(8, 200), zeros(8, 200), int32((200,)))
