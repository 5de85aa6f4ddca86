"""matmul against the fake-quantised product and gradients in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED, assert_close, assert_diff_below
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_cases import RECIPES, K, M, N, problem, random, vjp

from jax_fp8gemm import BF16, matmul, quantize


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("deepseek_v3", jnp.bfloat16),
        ("deepseek_v3", jnp.float16),
        ("deepseek_v3", jnp.float32),
        ("hybrid", jnp.bfloat16),
        ("pow2", jnp.bfloat16),
        ("e5m2", jnp.bfloat16),
        ("square_lhs", jnp.float32),
        ("square_lhs", jnp.bfloat16),
        ("wgrad_bf16", jnp.bfloat16),
        ("wgrad_bf16", jnp.float32),
    ],
)
def test_value_and_gradients_are_those_of_the_fake_quantised_product(name, dtype):
    recipe, kwargs = RECIPES[name]
    operands = problem(dtype)
    if name == "wgrad_bf16":
        # drhs multiplies bf16: operands that are bf16 already make the truth exact.
        operands = [x.astype(jnp.bfloat16).astype(dtype) for x in operands]
    # Eagerly: what the recipes have in common is compiled once.
    found = vjp(*operands, recipe=recipe)
    for x, expected in zip(found, reference.matmul_vjp(*operands, **kwargs), strict=True):
        assert_close(x, expected, dtype)


@given(m=st.integers(0, 300), n=st.integers(0, 300), k=st.integers(0, 300))
@settings(max_examples=12, deadline=None)
def test_value_and_gradients_of_any_shape(m, n, k):
    operands = random(m, k), random(k, n, seed=1), random(m, n, seed=2)
    # jit: one program a shape instead of one an operation.
    found = jax.jit(vjp)(*operands)
    for x, expected in zip(found, reference.matmul_vjp(*operands), strict=True):
        assert_close(x, expected, jnp.float32)


def test_eager_equals_jit():
    operands = problem()
    eager, jitted = vjp(*operands), jax.jit(vjp)(*operands)
    assert_diff_below(REORDERED, eager, jitted)


def test_compile_time_evaluation_inside_jit():
    operands = problem()

    @jax.jit
    def constants():
        with jax.ensure_compile_time_eval():
            return vjp(*operands)

    assert not constants.trace().jaxpr.eqns
    for x, y in zip(constants(), vjp(*operands), strict=True):
        np.testing.assert_array_equal(x, y)


def test_is_near_the_unquantised_product():
    lhs, rhs, _ = problem()
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
    assert 1e-5 < reference.calc_diff(matmul(lhs, rhs), exact) < 1e-3


def test_bf16_recipe_is_the_plain_dot():
    lhs, rhs, dout = problem(jnp.bfloat16)
    ours = jax.jit(functools.partial(vjp, recipe=BF16))(lhs, rhs, dout)
    plain = jax.jit(lambda l, r, d: (lambda o, f: (o, *f(d)))(*jax.vjp(jnp.matmul, l, r)))
    for x, y in zip(ours, plain(lhs, rhs, dout), strict=True):
        reference.assert_same_bits(x, y)


@pytest.mark.parametrize(
    "precision",
    ["high", jax.lax.Precision.HIGHEST, "highest", (None, "high"), (jax.lax.Precision.HIGH,) * 2],
)
def test_high_precision_runs_without_fp8(precision):
    lhs, rhs, _ = problem()
    np.testing.assert_allclose(
        matmul(lhs, rhs, precision=precision), lhs @ rhs, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT, (None, None)])
def test_default_precision_is_fp8(precision):
    lhs, rhs, _ = problem()
    np.testing.assert_array_equal(matmul(lhs, rhs, precision=precision), matmul(lhs, rhs))


@pytest.mark.parametrize(
    "precision", ["bf16", 3, ("high",), jax.lax.DotAlgorithmPreset.F64_F64_F64]
)
def test_unknown_precision_raises(precision):
    lhs, rhs, _ = problem()
    with raises(ValueError, match="matmul: precision must be None, DEFAULT, HIGH or HIGHEST"):
        matmul(lhs, rhs, precision=precision)


@pytest.mark.parametrize("kwargs", [dict(precision="highest"), dict(recipe=BF16)])
def test_cuda_implementation_of_the_xla_path_raises(kwargs):
    lhs, rhs, _ = problem()
    with raises(ValueError, match="implementation='cuda' must go with an FP8 recipe and default"):
        matmul(lhs, rhs, implementation="cuda", **kwargs)


def test_preferred_element_type_and_mixed_operands():
    lhs, rhs, _ = problem(jnp.bfloat16)
    full = matmul(lhs, rhs, preferred_element_type=jnp.float32)
    (expected,) = reference.matmul_vjp(lhs, rhs)
    assert_close(full, expected, jnp.float32)
    mixed = lhs, rhs.astype(jnp.float32)
    assert jax.eval_shape(matmul, *mixed).dtype == jnp.float32
    dlhs, drhs = jax.eval_shape(jax.grad(lambda l, r: matmul(l, r).sum(), (0, 1)), *mixed)
    assert (dlhs.dtype, drhs.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    "lhs_shape, rhs_shape",
    [
        ((K,), (K,)),
        ((K,), (K, N)),
        ((M, K), (K,)),
        ((2, 3, 5, K), (K, N)),
        ((2, 3, 5, K), (K,)),
        ((5, K), (2, 3, K, N)),
        ((2, 1, 5, K), (3, K, N)),
        ((2, 5, K), (2, K, N)),
        ((1, 5, K), (2, 1, K, N)),
        ((2, 0, K), (K, N)),
        ((M, 0), (0, N)),
    ],
)
def test_shapes_are_those_of_jnp_matmul(lhs_shape, rhs_shape):
    lhs, rhs = random(*lhs_shape), random(*rhs_shape, seed=1)
    out = matmul(lhs, rhs)
    exact = np.matmul(np.asarray(lhs), np.asarray(rhs))
    assert out.shape == exact.shape
    # 2 FP8 roundings of 2^-4 at worst, averaged over k terms.
    np.testing.assert_allclose(out, exact, rtol=0, atol=0.15 * math.sqrt(K))
    dlhs, drhs = jax.eval_shape(jax.grad(lambda *x: matmul(*x).sum(), (0, 1)), lhs, rhs)
    assert (dlhs.shape, drhs.shape) == (lhs_shape, rhs_shape)


def test_folded_rows_equal_the_rows_alone():
    lhs, rhs = random(4, 7, K), random(K, N, seed=1)
    out = matmul(lhs, rhs)
    for i in range(4):
        assert_diff_below(REORDERED, out[i], matmul(lhs[i], rhs))


@pytest.mark.parametrize("with_transpose", [False, True])
def test_scaled_rhs_gives_the_same_result_and_dlhs(with_transpose):
    lhs, rhs, dout = problem(jnp.bfloat16)
    scaled = quantize(rhs, block=(128, 128), with_transpose=with_transpose)
    out, pullback = jax.vjp(lambda lhs: matmul(lhs, scaled), lhs)
    expected_out, expected_dlhs, _ = vjp(lhs, rhs, dout)
    reference.assert_same_bits(out, expected_out)
    reference.assert_same_bits(pullback(dout)[0], expected_dlhs)


def test_scaled_rhs_without_fp8():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128))
    np.testing.assert_allclose(
        matmul(lhs, scaled, precision="highest"), lhs @ scaled.dequantize(), rtol=1e-5, atol=1e-5
    )


def test_gradient_of_a_scaled_rhs_raises():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128))
    with raises(TypeError, match="matmul: a ScaledArray rhs has no gradient; got one among"):
        jax.grad(lambda scaled: matmul(lhs, scaled).sum(), allow_int=True)(scaled)


@pytest.mark.parametrize(
    "lhs, rhs, kwargs, error, message",
    [
        (
            jnp.ones((2, 3)),
            jnp.ones((4, 5)),
            {},
            TypeError,
            r"lhs and rhs must share k; got k=3 in lhs f32\[2,3\], k=4 in rhs f32\[4,5\]",
        ),
        (
            jnp.ones((2, 3), int),
            jnp.ones((3, 2), int),
            {},
            TypeError,
            r"lhs must be bf16.*lhs s32\[2,3\]. Cast lhs with astype\(jnp.bfloat16\)",
        ),
        (
            jnp.ones((2, 3)),
            jnp.ones((3, 2), jnp.float8_e4m3fn),
            {},
            TypeError,
            r"rhs must be bf16, f16 or f32; got rhs f8e4m3fn\[3,2\]. Quantised .* ScaledArray",
        ),
        (jnp.ones(()), jnp.ones((3, 2)), {}, ValueError, r"lhs must be \(..., m, k\) or \(k,\)"),
        (jnp.ones((2, 3)), 2.0, {}, TypeError, "rhs must be an array; got float"),
        ([[1.0]], jnp.ones((1, 2)), {}, TypeError, r"lhs must be .*; got list. jnp.asarray makes "),
        (
            jnp.ones((2, 2, 3)),
            jnp.ones((5, 3, 2)),
            {},
            ValueError,
            r"batch dimensions of lhs and rhs must broadcast; got lhs f32\[2,2,3\], rhs",
        ),
        (
            jnp.ones((2, 3)),
            jnp.ones((3, 2)),
            dict(preferred_element_type=jnp.int32),
            TypeError,
            "preferred_element_type must be bf16, f16 or f32; got s32",
        ),
        (
            jnp.ones((2, 3)),
            jnp.ones((3, 2)),
            dict(preferred_element_type="bogus"),
            TypeError,
            "preferred_element_type must be bf16, f16 or f32; got 'bogus'",
        ),
    ],
)
def test_bad_input_is_told_at_trace_time(lhs, rhs, kwargs, error, message):
    with raises(error, match="matmul: " + message):
        matmul(lhs, rhs, **kwargs)


def test_scaled_lhs_raises():
    message = r"matmul: lhs must be an array; got a ScaledArray f8.*\[2,3\]. matmul quantises lhs"
    with raises(TypeError, match=message):
        matmul(quantize(jnp.ones((2, 3))), jnp.ones((3, 2)))
    with raises(TypeError, match=message + r" itself: .*\. scaled_matmul takes two ScaledArrays"):
        quantize(jnp.ones((2, 3))) @ jnp.ones((3, 2))


def test_scaled_rhs_with_row_blocks_raises():
    with raises(ValueError, match=r"matmul: rhs.block must be \(128, 128\), .*got \(1, 128\)"):
        matmul(jnp.ones((2, 3)), quantize(jnp.ones((3, 2))))
