import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED, assert_diff_below
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fp8gemm import BF16, HYBRID, dot_general, matmul, quantize

needs_flax = pytest.mark.skipif(not importlib.util.find_spec("flax"), reason="flax not installed")


def random(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def truth(lhs, rhs, dims):
    """float64 product of the operands quantised as documented: flattened, 1x128 and 128x128."""
    (lc, rc), (lb, rb) = dims
    lf = [d for d in range(lhs.ndim) if d not in (*lc, *lb)]
    rf = [d for d in range(rhs.ndim) if d not in (*rc, *rb)]
    sizes = lambda x, axes: [x.shape[d] for d in axes]
    flat = lambda x, *groups: (
        np.asarray(x)
        .transpose([d for g in groups for d in g])
        .reshape([int(np.prod(sizes(x, g))) for g in groups])
    )
    outs = [
        reference.fake_quantize(l) @ reference.fake_quantize(r, (128, 128))
        for l, r in zip(flat(lhs, lb, lf, lc), flat(rhs, rb, rc, rf), strict=True)
    ]
    return np.stack(outs).reshape(sizes(lhs, lb) + sizes(lhs, lf) + sizes(rhs, rf))


CASES = {
    "matmul": ((6, 150), (150, 7), (((1,), (0,)), ((), ()))),
    "rhs is (n, k)": ((6, 150), (7, 150), (((1,), (1,)), ((), ()))),
    "lhs is (k, m)": ((150, 6), (150, 7), (((0,), (0,)), ((), ()))),
    "two contracting dimensions": ((4, 5, 30, 10), (30, 10, 7), (((2, 3), (0, 1)), ((), ()))),
    "contracting in another order": ((4, 10, 30), (30, 10, 7), (((2, 1), (0, 1)), ((), ()))),
    "attention scores": ((2, 5, 3, 64), (2, 6, 3, 64), (((3,), (3,)), ((0, 2), (0, 2)))),
    "batch only": ((3, 4), (3, 4), (((), ()), ((0,), (0,)))),
    "outer product": ((4,), (5,), (((), ()), ((), ()))),
    "inner product": ((200,), (200,), (((0,), (0,)), ((), ()))),
    "negative": ((6, 150), (150, 7), (((-1,), (-2,)), ((), ()))),
}


@pytest.mark.parametrize("lhs_shape, rhs_shape, dims", CASES.values(), ids=CASES.keys())
def test_any_dimension_numbers(lhs_shape, rhs_shape, dims):
    lhs, rhs = random(*lhs_shape), random(*rhs_shape, seed=1)
    out = jax.jit(functools.partial(dot_general, dimension_numbers=dims))(lhs, rhs)
    (lc, rc), batch = dims
    positive = (tuple(d % lhs.ndim for d in lc), tuple(d % rhs.ndim for d in rc)), batch
    assert out.shape == jax.lax.dot_general(lhs, rhs, positive).shape
    np.testing.assert_allclose(out, truth(lhs, rhs, positive), rtol=1e-5, atol=1e-4)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_shape_and_dtype_are_those_of_lax(data):
    sizes = {name: data.draw(st.integers(1, 5), name) for name in "bmnk"}
    names = {"lhs": data.draw(st.permutations("bmk")), "rhs": data.draw(st.permutations("bkn"))}
    lhs, rhs = (jnp.ones([sizes[d] for d in names[x]], jnp.bfloat16) for x in ("lhs", "rhs"))
    axes = lambda d: ((names["lhs"].index(d),), (names["rhs"].index(d),))
    dims = (axes("k"), axes("b"))
    preferred = data.draw(st.sampled_from([None, jnp.float32]))
    call = lambda op: jax.eval_shape(
        lambda l, r: op(l, r, dims, preferred_element_type=preferred), lhs, rhs
    )
    assert call(dot_general) == call(jax.lax.dot_general)


def test_gradients_are_those_of_matmul():
    lhs, rhs = random(2, 3, 150), random(7, 150, seed=1)
    dims = (((2,), (1,)), ((), ()))
    ours = jax.grad(lambda *x: dot_general(*x, dims, recipe=HYBRID).sum(), (0, 1))(lhs, rhs)
    plain = jax.grad(lambda l, r: matmul(l, r.T, recipe=HYBRID).sum(), (0, 1))(lhs, rhs)
    assert_diff_below(REORDERED, ours, plain)


@pytest.mark.parametrize("kwargs", [dict(precision="highest"), dict(recipe=BF16)])
def test_runs_without_fp8_where_asked(kwargs):
    lhs, rhs = random(6, 150), random(150, 7, seed=1)
    dims = (((1,), (0,)), ((), ()))
    np.testing.assert_allclose(dot_general(lhs, rhs, dims, **kwargs), lhs @ rhs, atol=1e-5)
    assert np.abs(dot_general(lhs, rhs, dims) - lhs @ rhs).max() > 1e-3


def test_einsum_takes_it_as_its_dot_general():
    lhs, rhs = random(2, 5, 150), random(150, 7, seed=1)
    out = jnp.einsum("btk,kn->btn", lhs, rhs, _dot_general=dot_general)
    assert_diff_below(REORDERED, out, matmul(lhs, rhs))


def test_unknown_arguments_must_be_none():
    lhs, dims = jnp.ones((2, 2)), (((1,), (0,)), ((), ()))
    assert dot_general(lhs, lhs, dims, context=None).shape == (2, 2)
    with raises(TypeError, match=r"dot_general: arguments beyond .* be None; got \['context'\]"):
        dot_general(lhs, lhs, dims, context="train", other=None)


@needs_flax
def test_linen_dense():
    from flax import linen as nn

    x = random(4, 5, 150, dtype=jnp.bfloat16)
    dense = nn.Dense(16, dtype=jnp.bfloat16, dot_general=dot_general)
    params = dense.init(jax.random.key(0), x)
    out = dense.apply(params, x)
    kernel, bias = (params["params"][name].astype(jnp.bfloat16) for name in ("kernel", "bias"))
    reference.assert_same_bits(out, matmul(x, kernel) + bias[None, None])
    gradient = jax.grad(lambda p: dense.apply(p, x).astype(jnp.float32).sum())(params)
    assert gradient["params"]["kernel"].dtype == jnp.float32
    assert np.isfinite(gradient["params"]["kernel"]).all()


@needs_flax
def test_nnx_linear():
    from flax import nnx

    x = random(4, 5, 150)
    linear = nnx.Linear(150, 16, dot_general=dot_general, rngs=nnx.Rngs(0))
    expected = matmul(x, linear.kernel[...]) + linear.bias[...][None, None]
    assert_diff_below(REORDERED, linear(x), expected)
    gradient = nnx.grad(lambda linear: linear(x).sum())(linear)
    assert gradient.kernel[...].shape == (150, 16)


@needs_flax
def test_gradient_in_an_nnx_param():
    from flax import nnx

    x, kernel = random(6, 150), random(150, 7, seed=1)
    found = jax.grad(lambda w: (matmul(x, w) ** 2).sum())(nnx.Param(kernel))
    assert isinstance(found, nnx.Param)
    np.testing.assert_array_equal(found[...], jax.grad(lambda w: (matmul(x, w) ** 2).sum())(kernel))


@needs_flax
def test_nnx_linear_general():
    from flax import nnx

    x = random(4, 10, 15)
    layer = nnx.LinearGeneral(
        (10, 15), (3, 4), axis=(-2, -1), dot_general=dot_general, rngs=nnx.Rngs(0)
    )
    expected = truth(x, layer.kernel[...], (((1, 2), (0, 1)), ((), ())))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(140,), (6, 140), (2, 3, 140)], ids=str)
@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16"])
def test_rhs_that_is_quantised_already(shape, recipe):
    x, w = jnp.ones(shape, jnp.bfloat16), jax.random.normal(jax.random.key(0), (140, 24))
    w = w.astype(jnp.bfloat16)
    w_fp8 = quantize(w, block=(128, 128), with_transpose="only")
    dims = ((len(shape) - 1,), (0,)), ((), ())
    of = lambda rhs: jax.jit(lambda x: dot_general(x, rhs, dims, recipe=recipe))
    expected = w if recipe == "deepseek_v3" else w_fp8.dequantize(w.dtype)
    reference.assert_same_bits(of(w_fp8)(x), of(expected)(x))
    gradient_by = lambda rhs: jax.grad(lambda x: of(rhs)(x).sum())(x)
    reference.assert_same_bits(gradient_by(w_fp8), gradient_by(expected))


@pytest.mark.parametrize(
    "lhs, rhs, dims, error, message",
    [
        (
            jnp.ones((2, 3)),
            jnp.ones((4, 5)),
            (((1,), (0,)), ((), ())),
            TypeError,
            r"contracting dimensions of lhs and rhs must agree; got lhs f32\[2,3\], rhs f32\[4,5\]",
        ),
        (
            jnp.ones((2, 3, 4)),
            jnp.ones((3, 4, 5)),
            (((2,), (1,)), ((0,), (0,))),
            TypeError,
            r"batch dimensions of lhs and rhs must agree; got lhs f32\[2,3,4\]",
        ),
        (
            jnp.ones((2, 3)),
            jnp.ones((3, 5)),
            (((1,), (-3,)), ((), ())),
            TypeError,
            r"dimension numbers must be within the ranks; got .*\(\(\(1,\), \(-3,\)\)",
        ),
        (
            jnp.ones((3, 3)),
            jnp.ones((3, 3)),
            (((1, 1), (0, 1)), ((), ())),
            TypeError,
            "dimension numbers must name a dimension once",
        ),
        (
            jnp.ones((2, 3), jnp.int8),
            jnp.ones((3, 5), jnp.int8),
            (((1,), (0,)), ((), ())),
            TypeError,
            r"lhs must be bf16, f16 or f32; got lhs s8\[2,3\]",
        ),
        (
            jnp.ones((2, 3)),
            quantize(jnp.ones((5, 3)), block=(128, 128)),
            (((1,), (1,)), ((), ())),
            ValueError,
            r"a ScaledArray rhs must be \(k, n\), contracted with the last .*f8e4m3fn\[5,3\]",
        ),
        (
            jnp.ones((4, 2, 3)),
            quantize(jnp.ones((4, 3, 5)), block=(128, 128)),
            (((2,), (1,)), ((0,), (0,))),
            ValueError,
            r"a ScaledArray rhs must be .*, without batch dimensions; .* pass a QuantizedWeight",
        ),
        (
            jnp.ones((2, 3)),
            quantize(jnp.ones((3, 5))),
            (((1,), (0,)), ((), ())),
            ValueError,
            r"rhs.block must be \(128, 128\)",
        ),
    ],
)
def test_bad_input_is_told_at_trace_time(lhs, rhs, dims, error, message):
    with raises(error, match="dot_general: " + message):
        dot_general(lhs, rhs, dims)


@pytest.mark.parametrize(
    "dims",
    [
        None,
        5,
        (((1,), (0,)),),
        ((1, 0), ((), ())),
        (((1.0,), (0,)), ((), ())),
        (((1,), ("k",)), ((), ())),
        (((1,), (0,), ()), ((), ())),
    ],
)
def test_dimension_numbers_that_are_none_raise(dims):
    lhs = jnp.ones((2, 2))
    with raises(TypeError, match=r"dot_general: dimension_numbers must be \(\(lhs .*; got"):
        dot_general(lhs, lhs, dims)


def test_dimension_numbers_may_be_lists_of_numpy_ints():
    lhs, rhs = random(6, 150), random(150, 7, seed=1)
    out = dot_general(lhs, rhs, [[np.array([1]), [np.int64(0)]], [[], []]])
    np.testing.assert_array_equal(out, dot_general(lhs, rhs, (((1,), (0,)), ((), ()))))


def test_unknown_precision_raises():
    lhs = jnp.ones((2, 2))
    with raises(ValueError, match="dot_general: precision must be .*; got 'fp8'"):
        dot_general(lhs, lhs, (((1,), (0,)), ((), ())), precision="fp8")
