import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED, assert_diff_below
from errors import raises
from matmul_cases import random

from jax_fp8gemm import Recipe, einsum, matmul, quantize

EXACT = Recipe(pow2_scale=True)
X, W = random(2, 70, 256), random(256, 4, 32, seed=1)


def test_a_projection_has_the_bits_of_matmul():
    found = einsum("bsd,dnh->bsnh", X, W)
    expected = matmul(X.reshape(140, 256), W.reshape(256, 128)).reshape(2, 70, 4, 32)
    assert_diff_below(REORDERED, found, expected)


@pytest.mark.parametrize(
    "subscripts, lhs, rhs",
    [
        ("mk,kn->mn", (6, 256), (256, 10)),
        ("mk,nk", (6, 256), (10, 256)),
        ("bqd,bkd->bqk", (3, 6, 128), (3, 5, 128)),
        ("...k,kn->...n", (2, 3, 128), (128, 10)),
        ("kab,abn->nk", (6, 4, 32), (4, 32, 10)),
        ("mkj,kn->nm", (6, 128, 2), (128, 10)),  # j is summed first
    ],
)
def test_results_and_gradients_are_those_of_jnp(subscripts, lhs, rhs):
    """Of small integers, in power-of-two scales: exact."""
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.integers(-2, 3, shape), jnp.float32) for shape in (lhs, rhs))
    loss = lambda op: lambda *args: op(subscripts, *args)
    found, pullback = jax.vjp(loss(lambda *args: einsum(*args, recipe=EXACT)), lhs, rhs)
    expected, expected_pullback = jax.vjp(loss(jnp.einsum), lhs, rhs)
    np.testing.assert_array_equal(found, expected)
    dout = jnp.asarray(rng.integers(-1, 2, expected.shape), jnp.float32)
    for x, y in zip(pullback(dout), expected_pullback(dout), strict=True):
        np.testing.assert_array_equal(x, y)


def test_dtypes_and_options():
    x, w = random(4, 256, dtype=jnp.bfloat16), random(256, 8)
    assert einsum("mk,kn->mn", x, w).dtype == jnp.float32
    assert einsum("mk,kn->mn", x, w.astype(x.dtype)).dtype == jnp.bfloat16
    half = einsum("mk,kn->mn", x, w, preferred_element_type=jnp.float16)
    assert half.dtype == jnp.float16
    reference.assert_same_bits(
        einsum("mk,kn->mn", w.T, w, precision="highest"),
        jnp.einsum("mk,kn->mn", w.T, w, precision="highest"),
    )


@pytest.mark.parametrize(
    "args, error, message",
    [
        (
            ("mk,kn,nj->mj", X[0], W[:, 0], W[:, 0]),
            TypeError,
            "operands must be two .*; got 3. Co",
        ),
        (("mk->m", X[0]), TypeError, "operands must be two arrays; got 1"),
        ((X[0], [0, 1]), TypeError, "subscripts must be text, as 'mk,kn->mn'; got f32"),
        (
            ("mk,kn->mn", X[0], quantize(W[:, 0])),
            TypeError,
            r"rhs must be an array or a QuantizedWeight; got a ScaledArray f8e4m3fn\[256,32\]. "
            r"matmul and dot_general take a ScaledArray \(k, n\): matmul\(lhs, rhs\), or "
            r"matmul\(lhs, rhs.T\) for the other dimension.$",
        ),
        (
            ("mk,kn->mn", quantize(X[0]), W[:, 0]),
            TypeError,
            r"lhs must be an array; got a ScaledArray f8e4m3fn\[70,256\]. einsum quantises lhs ",
        ),
        (("mk,kn->mn", X[0], 1.0), TypeError, "rhs must be an array; got float"),
    ],
)
def test_bad_input_ends_in_a_sentence(args, error, message):
    with raises(error, match="einsum: " + message):
        einsum(*args)


def test_subscripts_that_do_not_fit_are_told_by_jnp():
    with raises(ValueError, match="Size of label 'k'|Einstein sum|dimension"):
        einsum("mk,kn->mn", X[0], W[1:, 0])
