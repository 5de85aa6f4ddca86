"""route against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises

from jax_fp8gemm.moe import route

M, E, TOP_K = 40, 6, 2
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(M, E)), jnp.float32)


def scores(logits, scoring):
    logits = np.asarray(logits, np.float64)
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, TOP_K, E])
def test_route(top_k, scoring, normalize):
    indices, weights = route(LOGITS, top_k, scoring=scoring, normalize=normalize)
    expected = np.argsort(-np.asarray(LOGITS), axis=1)[:, :top_k]
    np.testing.assert_array_equal(indices, expected)
    chosen = np.take_along_axis(scores(LOGITS, scoring), expected, axis=1)
    if normalize:
        chosen = chosen / chosen.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, chosen, rtol=1e-5)
    assert (indices.dtype, weights.dtype) == (jnp.int32, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_route_computes_in_f32(dtype):
    logits = LOGITS.astype(dtype)
    _, weights = route(logits, TOP_K)
    _, expected = route(logits.astype(jnp.float32), TOP_K)
    reference.assert_same_bits(weights, expected)


def test_of_equal_logits_the_first_is_chosen():
    logits = jnp.asarray([[0.0, 1, 1, 0, 1, 0], [3] * 6])
    np.testing.assert_array_equal(route(logits, 4)[0], [[1, 2, 4, 0], [0, 1, 2, 3]])
    # Scores that are equal in f32 do not make their logits equal.
    saturated = jnp.asarray([[30.0, 40, 50, 20]])
    np.testing.assert_array_equal(route(saturated, 2, scoring="sigmoid")[0], [[2, 1]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_zeros_of_either_sign_are_equal(dtype):
    values = np.asarray([-1, -1e-4, -0.0, 0.0, 1e-4, 1], np.float32)
    # Subnormal f32 numbers are no zeros.
    values = np.append(values, [-1e-40, 1e-40]) if dtype == jnp.float32 else values
    logits = np.random.default_rng(1).choice(values, size=(M, E)).astype(np.float32)
    expected = np.argsort(-logits, axis=1, kind="stable")
    for run in (route, jax.jit(route, static_argnums=1)):
        np.testing.assert_array_equal(run(jnp.asarray(logits, dtype), E)[0], expected)


def test_sigmoids_that_underflow_keep_their_ratio():
    logits = jnp.asarray([[-200.0, -201, -300]])
    weights = lambda logits: route(logits, TOP_K, scoring="sigmoid")[1]
    np.testing.assert_allclose(
        weights(logits)[0], [1 / (1 + np.exp(-1)), 1 / (1 + np.e)], rtol=1e-5
    )
    slope = np.exp(-1) / (1 + np.exp(-1)) ** 2
    gradient = jax.grad(lambda logits: weights(logits)[0, 0])(logits)
    np.testing.assert_allclose(gradient[0], [slope, -slope, 0], rtol=1e-4)


def test_experts_masked_by_minus_infinity_have_no_weight():
    logits = jnp.asarray([[1.0, -np.inf, -np.inf, 2]])
    for scoring in ("softmax", "sigmoid"):
        total = lambda x, s=scoring: (route(x, 3, scoring=s)[1] * jnp.arange(1.0, 4)[None]).sum()
        indices, weights = route(logits, 3, scoring=scoring)
        np.testing.assert_array_equal(indices, [[3, 0, 1]])
        np.testing.assert_array_equal(weights[0, 2], 0)
        assert np.all(np.isfinite(jax.grad(total)(logits)))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_gradient_of_route_is_that_of_its_differences(scoring):
    logits = np.asarray(LOGITS, np.float64)
    direction, dweights = np.random.default_rng(4).normal(size=(2, M, E))
    dweights = dweights[:, :TOP_K]
    weights = lambda logits: route(logits, TOP_K, scoring=scoring)[1]
    (dlogits,) = jax.vjp(weights, LOGITS)[1](jnp.asarray(dweights, jnp.float32))

    def along(step):
        moved = scores(logits + step * direction, scoring)
        chosen = np.take_along_axis(moved, np.argsort(-logits, axis=1)[:, :TOP_K], axis=1)
        return (chosen / chosen.sum(axis=1, keepdims=True) * dweights).sum()

    expected = (along(1e-4) - along(-1e-4)) / 2e-4
    np.testing.assert_allclose((np.asarray(dlogits) * direction).sum(), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "logits, kwargs, error, message",
    [
        (LOGITS, dict(top_k=0), ValueError, r"1..num_experts; got 0, logits f32\[40,6\]"),
        (LOGITS, dict(top_k=2.0), ValueError, "top_k must be an integer, 1..num_experts; got 2.0"),
        (LOGITS, dict(top_k=2, normalize="no"), TypeError, "normalize must be True or False; got"),
        (LOGITS, dict(top_k=7), ValueError, "top_k must be an integer, 1..num_experts; got 7"),
        (LOGITS, dict(top_k=2, scoring="relu"), ValueError, "'sqrtsoftplus'; got 'relu'"),
        (LOGITS[0, 0], dict(top_k=2), ValueError, r"must be \(\.\.\., num_experts\); got"),
        (LOGITS.astype(int), dict(top_k=2), TypeError, "must be bf16, f16 or f32; got logits s32"),
    ],
)
def test_bad_routes_raise(logits, kwargs, error, message):
    with raises(error, match="route: .*" + message):
        route(logits, **kwargs)


def test_options_must_be_static():
    with raises(TypeError, match=r"route: top_k must be static; got a traced s32\[\]. Name it in"):
        jax.jit(route)(LOGITS, 2)
    with raises(TypeError, match="route: normalize must be static; got a traced bool"):
        jax.jit(route, static_argnums=1)(LOGITS, 2, normalize=True)
