"""Products of the recipe batch_invariant without FP8, against their bits in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from errors import raises
from jax.sharding import NamedSharding, PartitionSpec

import jax_fp8gemm as jf

RECIPE = jf.Recipe(fwd=None, batch_invariant=True)
BF16, F32, F16 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float32, np.float16))


def matmul(lhs, rhs, **how):
    return jf.matmul(jnp.asarray(lhs), jnp.asarray(rhs), recipe=RECIPE, **how)


def _integers(x):
    """Rows of integers, and their unit: 2^-21 of the power of two at or below the largest |x|."""
    x = x.astype(np.float64)
    exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True))[1] - 1
    unit = np.ldexp(1.0, exponent - 21)
    return np.trunc(x / unit + np.copysign(0.5, x)).astype(np.int64), unit


def model(lhs, rhs, dtype=F32):
    """For normal numbers, and sums below 2^53 units, which f64 rounds to f32 once."""
    (x, x_unit), (y, y_unit) = _integers(lhs), _integers(rhs.T)
    sums = x @ y.T
    assert np.abs(sums).max() < 2**53
    out = (sums * x_unit * y_unit.T).astype(np.float32).astype(dtype)
    # In f16, subnormal results become zeros.
    return np.where(np.abs(out) < 2.0**-14, out * 0, out) if dtype == F16 else out


def draw(rng, shape, dtype=F32):
    """Numbers of many sizes, in rows of many more; none is subnormal in f16."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-10, 2, shape)
    x = np.where(np.abs(x) < 2.0**-10, 0, x)
    return (x * 2.0 ** rng.integers(-3, 2, (shape[0], 1))).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)], ids=str)
def test_products_and_gradients_equal_the_model(dtypes):
    rng = np.random.default_rng(0)
    lhs, rhs = draw(rng, (9, 300), dtypes[0]), draw(rng, (300, 40), dtypes[1])
    out, vjp = jax.vjp(matmul, jnp.asarray(lhs), jnp.asarray(rhs))
    reference.assert_same_bits(out, model(lhs, rhs, out.dtype))
    dout = draw(rng, out.shape, out.dtype)
    expected = model(dout, rhs.T, lhs.dtype), model(lhs.T, dout, rhs.dtype)
    for found, gradient in zip(vjp(jnp.asarray(dout)), expected, strict=True):
        reference.assert_same_bits(found, gradient)


def test_the_error_is_that_of_an_f32_sum():
    rng = np.random.default_rng(1)
    lhs, rhs = (rng.standard_normal(s).astype(np.float32) for s in ((40, 2000), (2000, 30)))
    exact = lhs.astype(np.float64) @ rhs
    error = np.linalg.norm(matmul(lhs, rhs) - exact) / np.linalg.norm(exact)
    # Units are 2^-21 of numbers up to five times the usual size: 5 * 2^-22 / sqrt(3) an operand.
    assert error < 2 * 5 * 2.0**-22 / 3**0.5


def test_batches_and_programs_change_no_bit():
    rng = np.random.default_rng(2)
    lhs, rhs = draw(rng, (333, 136)), draw(rng, (136, 24))
    expected = model(lhs, rhs)
    run = jax.jit(matmul)
    for m in (1, 17, 333):
        reference.assert_same_bits(run(lhs[:m], rhs), expected[:m])
    mapped = jax.vmap(matmul, (0, None))(lhs.reshape(9, 37, -1), rhs)
    reference.assert_same_bits(mapped.reshape(expected.shape), expected)

    @jax.jit
    def fused(lhs, rhs, one):
        out = matmul(lhs * one, rhs * one)
        return out, out * one + 1, jnp.exp(out).sum()

    reference.assert_same_bits(fused(lhs, rhs, np.float32(1))[0], expected)
    operands = jnp.asarray(rhs.T), jnp.asarray(lhs)
    reference.assert_same_bits(matmul(lhs.reshape(9, 37, -1), rhs), mapped)
    contracted = jf.dot_general(*operands, (((1,), (1,)), ((), ())), recipe=RECIPE)
    reference.assert_same_bits(contracted.T, expected)


@pytest.mark.parametrize(
    "specs", [(("x", None), (None, None)), ((None, "x"), ("x", None))], ids=str
)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_changes_no_bit(kind, specs):
    """Devices add integers where the mesh cuts k."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType[kind],))
    rng = np.random.default_rng(3)
    lhs, rhs = draw(rng, (16, 256)), draw(rng, (256, 24))
    shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    operands = [jax.device_put(x, s) for x, s in zip((lhs, rhs), shardings, strict=True)]
    how = dict(out_sharding=NamedSharding(mesh, PartitionSpec())) if kind == "Explicit" else {}
    reference.assert_same_bits(jax.jit(partial(matmul, **how))(*operands), model(lhs, rhs))


def test_inf_and_nan_fill_their_row_or_column():
    lhs, rhs = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    lhs[1, 2], rhs[0, 3] = np.inf, np.nan
    is_nan = np.isnan(matmul(lhs, rhs))
    np.testing.assert_array_equal(is_nan.any(axis=0) & is_nan.all(axis=0), [0, 0, 0, 1, 0])
    np.testing.assert_array_equal(is_nan.all(axis=1), [0, 1, 0])
    zeros = np.zeros((3, 4), np.float32)
    np.testing.assert_array_equal(matmul(zeros, np.ones((4, 5), np.float32)), np.zeros((3, 5)))


def test_more_of_k_than_one_sum_takes():
    rng = np.random.default_rng(4)
    lhs, rhs = (rng.integers(-3, 4, s).astype(np.float32) for s in ((2, 70_000), (70_000, 3)))
    np.testing.assert_array_equal(matmul(lhs, rhs), lhs.astype(np.float64) @ rhs)
    with raises(NotImplementedError, match="must sum over a known number of elements, 262144"):
        jax.eval_shape(matmul, *(jax.ShapeDtypeStruct(s, F32) for s in ((2, 2**19), (2**19, 3))))


def test_a_second_derivative_raises():
    square = lambda x: (matmul(x, x) ** 2).sum()
    with raises(NotImplementedError, match="matmul: is differentiable once, in reverse mode"):
        jax.grad(lambda x: jax.grad(square)(x).sum())(jnp.ones((8, 8)))


def test_grouped_products_do_not_have_it():
    operands = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.asarray([1, 3])
    with raises(NotImplementedError, match="ragged_dot: batch_invariant must go with an FP8 fwd"):
        jf.ragged_dot(*operands, recipe=RECIPE)


@pytest.mark.parametrize("m, k, n", [(4, 0, 3), (4, 5, 0), (0, 5, 3)])
def test_gradients_of_empty_extents(m, k, n):
    operands = jnp.ones((m, k)), jnp.ones((k, n))
    loss = lambda lhs, rhs: matmul(lhs, rhs).sum()
    dlhs, drhs = jax.grad(loss, argnums=(0, 1))(*operands)
    np.testing.assert_array_equal(dlhs, np.full((m, k), n))
    np.testing.assert_array_equal(drhs, np.full((k, n), m))
