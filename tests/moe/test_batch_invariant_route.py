"""route(batch_invariant=True) against its bits in NumPy, in many programs and batches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import wide_model
from errors import raises

from jax_fp8gemm.moe import route

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
E, TOP_K = 16, 4
RNG = np.random.default_rng(0)
# Rows of any size, logits far below others, zeros, subnormal numbers.
LOGITS = (RNG.normal(size=(333, E)) * RNG.choice([1e-6, 0.1, 1, 5, 40, 1e4], (333, 1))).astype("f4")
LOGITS[:4, :4] = [-0.0, 1e-40, -1e-40, 127.99]
DOUT = RNG.normal(size=(333, TOP_K)).astype(np.float32)
BIAS = (RNG.normal(size=E) / 8).astype(np.float32)
scorings = pytest.mark.parametrize("scoring", SCORINGS)
normalizes = pytest.mark.parametrize("normalize", (True, False))


def _route(logits, dout, *, scoring, normalize=True, **how):
    run = partial(route, top_k=TOP_K, scoring=scoring, normalize=normalize, batch_invariant=True)
    indices, weights = run(logits, **how)
    (dlogits,) = jax.vjp(lambda x: run(x, **how)[1], logits)[1](dout)
    return indices, weights, dlogits


def _expected(logits, dout, scoring, normalize, scale):
    """What docs/numerics.md says; the choices are those of the largest logits."""
    flushed = np.where(np.abs(logits) < 2.0**-126, np.float32(0), logits)
    indices = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :TOP_K]
    choose = lambda x: np.take_along_axis(x, indices, axis=1)
    dlogits = np.zeros_like(logits)
    if scoring == "softmax" and not normalize:
        weights = choose(wide_model.scores(flushed, scoring, False, scale))
        np.put_along_axis(dlogits, indices, dout, axis=1)
        return indices, weights, wide_model.gradient(flushed, dlogits, scoring, False, scale)
    weights = wide_model.scores(choose(flushed), scoring, normalize, scale)
    of_chosen = wide_model.gradient(choose(flushed), dout, scoring, normalize, scale)
    np.put_along_axis(dlogits, indices, of_chosen, axis=1)
    return indices, weights, dlogits


def _same(found, expected):
    for x, y in zip(found, expected, strict=True):
        x, y = (np.asarray(a) for a in (x, y))
        assert x.dtype == y.dtype or x.dtype == np.int32
        np.testing.assert_array_equal(x, y)  # 0 equals -0: no consumer tells them apart but by sign


@normalizes
@scorings
def test_the_bits_are_those_of_the_model(scoring, normalize):
    run = jax.jit(partial(_route, scoring=scoring, normalize=normalize, scale=2.5))
    _same(run(LOGITS, DOUT), _expected(LOGITS, DOUT, scoring, normalize, 2.5))


@normalizes
@scorings
def test_scores_are_those_of_float64(scoring, normalize):
    x = LOGITS.astype(np.float64)
    if scoring == "softmax":
        truth, is_sum = np.exp(x - x.max(axis=1, keepdims=True)), True
    elif scoring == "sigmoid":
        truth, is_sum = 1 / (1 + np.exp(np.minimum(-x, 700))), normalize
    else:
        truth, is_sum = np.sqrt(np.logaddexp(0, x)), normalize
    log = truth > 2.0**-120
    truth = truth / truth.sum(axis=1, keepdims=True) if is_sum else truth
    found = wide_model.scores(LOGITS, scoring, normalize)
    log &= truth > 2.0**-126
    # Half an ulp of the result, and 2^-26 of each of two logits.
    error = np.abs(found[log] / truth[log] - 1)
    assert error.max() < 2.0**-24 + 2 * 2.0**-25
    assert np.all(found[truth < 2.0**-127] == 0)


def test_the_programs_around_change_no_bit():
    run = partial(_route, scoring="sigmoid")
    expected = jax.jit(run)(LOGITS, DOUT)
    half = LOGITS / 2  # exact

    def scaled(a, b, dout):
        """Logits are a product that XLA may fuse; weights and gradients are used in sums."""
        indices, weights, dlogits = run(a * b, dout)
        return indices, weights, dlogits, weights * dout + 1, jnp.exp(dlogits).sum()

    _same(jax.jit(scaled)(half, jnp.full_like(half, 2), DOUT)[:3], expected)
    _same(jax.jit(jax.vmap(run))(LOGITS, DOUT), expected)
    _same(jax.lax.map(lambda xs: run(*xs), (LOGITS, DOUT)), expected)


def test_the_batch_changes_no_bit():
    how = dict(scoring="sigmoid", bias=jnp.asarray(BIAS), n_group=4, topk_group=2)
    run = jax.jit(partial(_route, **how))
    expected = run(LOGITS, DOUT)
    for m in (1, 17, 4096):
        rows = np.resize(np.arange(333), m)
        _same(run(LOGITS[rows], DOUT[rows]), [np.asarray(x)[rows] for x in expected])


def test_equal_logits_are_chosen_in_order():
    logits = jnp.asarray([[0.0, 1, 1, 0, 1, -0.0], [3] * 6])
    indices, weights = route(logits, 4, batch_invariant=True)
    np.testing.assert_array_equal(indices, [[1, 2, 4, 0], [0, 1, 2, 3]])
    np.testing.assert_array_equal(weights[1], 0.25)


@scorings
def test_inf_and_nan_are_those_of_route(scoring):
    inf = np.inf
    rows = [[1, -inf, 2, 0], [-inf] * 4, [inf, 1, 2, 3], [np.nan, 1, 2, 3], [inf, inf, 0, 1]]
    logits = jnp.asarray(rows)
    indices, weights = route(logits, 3, scoring=scoring, batch_invariant=True)
    expected_indices, expected = route(logits, 3, scoring=scoring)
    np.testing.assert_array_equal(indices, expected_indices)
    # route makes some weights beside a NaN 0; here all of the row are NaN.
    is_bad = np.isnan(weights).any(axis=1)
    np.testing.assert_array_equal(is_bad, np.isnan(expected).any(axis=1))
    np.testing.assert_allclose(weights[~is_bad], expected[~is_bad], rtol=1e-5)  # see test_route.py


def test_dtypes_are_converted_exactly():
    logits = jnp.asarray(LOGITS[:9], jnp.bfloat16)
    run = partial(route, top_k=TOP_K, batch_invariant=True)
    reference.assert_same_bits(run(logits)[1], run(logits.astype(jnp.float32))[1])


def test_what_it_does_not_take():
    with raises(TypeError, match="route: batch_invariant must be True or False; got 1"):
        route(LOGITS, 2, batch_invariant=1)
    run = lambda x: route(x, 2, batch_invariant=True)[1]
    with raises(NotImplementedError, match="route: must be differentiated in reverse mode"):
        jax.jvp(run, (jnp.asarray(LOGITS),), (jnp.asarray(LOGITS),))
    with raises(NotImplementedError, match="route: is differentiable once"):
        jax.grad(lambda x: jax.grad(lambda x: run(x)[0, 0])(x)[0, 0])(jnp.asarray(LOGITS))
    many = jax.ShapeDtypeStruct((1, 40_000), jnp.float32)
    with raises(NotImplementedError, match="route: batch_invariant must go with up to 32768 expe"):
        jax.eval_shape(run, many)


def test_with_x64_and_strict_promotion():
    """The same bits, and no array in int64."""
    run = partial(route, top_k=TOP_K, batch_invariant=True)
    expected = run(jnp.asarray(LOGITS))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = run(jnp.asarray(LOGITS))
        assert f"i64[{len(LOGITS)}" not in str(jax.make_jaxpr(run)(LOGITS))
    for a, b in zip(found, expected, strict=True):
        reference.assert_same_bits(a, b)
