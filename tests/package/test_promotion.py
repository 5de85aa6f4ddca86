"""As in JAX: f64 of NumPy, float, integers, algorithms, and the types of errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, without_annotation_checks

import jax_fp8gemm as fp8
from jax_fp8gemm import moe

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(8, 128)), RNG.normal(size=(2, 128, 128))
SIZES, CHOICES = np.asarray([5, 3]), np.arange(16).reshape(8, 2) % 2
NUMBERS = (((1,), (0,)), ((), ()))
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
PRODUCTS = {
    "matmul": lambda x, w: fp8.matmul(x, w[0]),
    "dot_general": lambda x, w: fp8.dot_general(x, w[0], NUMBERS),
    "ragged_dot": lambda x, w: fp8.ragged_dot(x, w, SIZES),
    "ragged_dot_general": lambda x, w: fp8.ragged_dot_general(x, w[0][:8], SIZES, OVER_ROWS),
}
OTHERS = {
    "quantize": lambda x, w: fp8.quantize(x),
    "quantize_both": lambda x, w: fp8.quantize_both(x),
    "quantize_ragged": lambda x, w: fp8.quantize_ragged(x, SIZES),
    "moe_mlp": lambda x, w: moe.moe_mlp(x, np.concatenate([w, w], axis=2), w, SIZES),
    "moe_layer": lambda x, w: moe.moe_layer(
        x, x[:, :2], np.concatenate([w, w], axis=2), w, top_k=1
    ),
    "moe_layer of choices": lambda x, w: moe.moe_layer(
        x, (CHOICES, x[:, :2]), np.concatenate([w, w], axis=2), w
    ),
    "route": lambda x, w: moe.route(x, 2),
    "permute": lambda x, w: moe.permute(x, CHOICES, 2),
    "unpermute": lambda x, w: moe.unpermute(x, jnp.arange(8, dtype=jnp.int32)[:, None], x[:, :1]),
}
OPS = PRODUCTS | OTHERS
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
each_product = pytest.mark.parametrize("op", PRODUCTS.values(), ids=PRODUCTS.keys())


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)


@each_op
def test_f64_of_numpy_is_f32(op):
    with without_annotation_checks():
        assert_same(op(X, W), op(X.astype(np.float32), W.astype(np.float32)))


@each_op
def test_f64_stays_f64_with_x64(op):
    message = r"must be bf16, f16 or f32; got \w+ f64\[.*\]\. jax_enable_x64 keeps f64 as it is: "
    with jax.enable_x64(True), raises(TypeError, match=message):
        op(X, W)


def test_f64_beyond_f32_is_infinite():
    assert np.isnan(fp8.quantize(np.full((1, 1), 1e300)).scale).all()


@pytest.mark.parametrize("dtype", [float, np.float64, "float64"])
def test_float_is_f32(dtype):
    with without_annotation_checks():
        x = jnp.asarray(X, jnp.bfloat16)
        assert fp8.matmul(x, x.T, preferred_element_type=dtype).dtype == jnp.float32
        assert fp8.dequantize(fp8.quantize(x), dtype).dtype == jnp.float32
    with jax.enable_x64(True), raises(TypeError, match="preferred_element_type must .*; got f64$"):
        fp8.matmul(x, x.T, preferred_element_type=dtype)


@pytest.mark.parametrize("floats", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("integers", [np.int8, np.uint16, np.int64, np.bool_])
@each_product
def test_integers_are_cast_to_the_floats_beside_them(op, integers, floats):
    x, w = jnp.asarray(X, floats), jnp.asarray(W, floats)
    xi, wi = (5 * X).astype(integers), (5 * W).astype(integers)
    with without_annotation_checks():
        found = op(xi, w), op(x, wi)
    # In JAX's own way: NumPy's integers of 64 bits are cast by way of 32.
    expected = op(jnp.asarray(xi).astype(floats), w), op(x, jnp.asarray(wi).astype(floats))
    assert_same(found, expected)
    with jax.numpy_dtype_promotion("standard"):
        assert found[0].dtype == jnp.matmul(xi, w[0]).dtype


def test_gradient_beside_integers():
    x, w = jnp.asarray(5 * X, jnp.int32), jnp.asarray(W[0], jnp.float32)
    with without_annotation_checks():
        loss = lambda x, w: fp8.matmul(x, w).sum()
        found = jax.grad(loss, 1)(x, w)
    np.testing.assert_array_equal(found, jax.grad(loss, 1)(x.astype(jnp.float32), w))


@each_product
def test_two_operands_of_integers(op):
    with raises(TypeError, match="lhs must be bf16, f16 or f32; got lhs s32"):
        op(jnp.asarray(X, jnp.int32), jnp.asarray(W, jnp.int32))


PRESETS = jax.lax.DotAlgorithmPreset


@pytest.mark.parametrize("precision", [PRESETS.BF16_BF16_F32, "BF16_BF16_F32"])
@each_product
def test_an_algorithm_is_a_product_of_xla(op, precision, monkeypatch):
    x, w = jnp.asarray(X, jnp.float32), jnp.asarray(W, jnp.float32)
    for name in ("matmul", "dot_general", "ragged_dot", "ragged_dot_general"):
        run = partial(getattr(fp8, name), precision=precision)
        monkeypatch.setattr(fp8, name, run)
    text = jax.jit(lambda x, w: op(x, w)).lower(x, w).as_text()  # not op: JAX keeps its trace
    assert "f8E4M3FN" not in text and "lhs_precision_type = bf16" in text


def test_the_default_algorithm_is_fp8():
    x, w = jnp.asarray(X, jnp.float32), jnp.asarray(W[0], jnp.float32)
    np.testing.assert_array_equal(fp8.matmul(x, w, precision=PRESETS.DEFAULT), fp8.matmul(x, w))


@pytest.mark.parametrize(
    "precision",
    [PRESETS.F64_F64_F64, "F64_F64_F64", PRESETS.ANY_F8_ANY_F8_F32, (PRESETS.BF16_BF16_F32,) * 2],
)
def test_other_algorithms(precision):
    message = "^matmul: precision must be None, .* or a DotAlgorithmPreset of bf16, f16, tf32 or f"
    with raises(ValueError, match=message):
        fp8.matmul(jnp.ones((2, 2)), jnp.ones((2, 2)), precision=precision)


ones = jnp.ones
NO_SUCH_DIMS = (((5,), (0,)), ((), ()))
MISMATCHES = [
    ("matmul", (ones((4, 3)), ones((5, 4)))),
    ("matmul", (ones((2, 4, 3)), ones((3, 3, 4)))),
    ("matmul", (ones(()), ones((3, 4)))),
    ("dot_general", (ones((4, 3)), ones((5, 4)), NUMBERS)),
    ("dot_general", (ones((2, 4, 3)), ones((3, 3, 4)), (((2,), (1,)), ((0,), (0,))))),
    ("dot_general", (ones((4, 3)), ones((3, 4)), NO_SUCH_DIMS)),
    ("ragged_dot", (ones((4, 3)), ones((2, 5, 4)), SIZES)),
    ("ragged_dot", (ones((2, 4, 3)), ones((2, 3, 4)), SIZES)),
    ("ragged_dot", (ones((4, 3)), ones((3, 4)), SIZES)),
    ("ragged_dot", (ones((4, 3)), ones((3, 3, 4)), SIZES)),
    ("ragged_dot", (ones((4, 3)), ones((2, 3, 4)), SIZES[None])),
    ("ragged_dot_general", (ones((4, 3)), ones((5, 4)), SIZES, OVER_ROWS)),
]


@pytest.mark.parametrize("op, args", MISMATCHES)
def test_wrong_shapes_raise_what_jax_raises(op, args):
    theirs = jnp.matmul if op == "matmul" else getattr(jax.lax, op)
    with pytest.raises((TypeError, ValueError)) as error:
        theirs(*args)
    with raises(error.type, match=f"^{op}: "):
        getattr(fp8, op)(*args)
