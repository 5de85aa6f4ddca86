import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import shapes
from assertions import SCALED_PRODUCT, assert_close
from errors import raises

from jax_fp8gemm import ScaledArray, quantize, scaled_matmul

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
KINDS = {"1d2d": (128, 128), "1d1d": (1, 128)}


@functools.cache
def operands(m, n, k, kind="1d2d", lhs_dtype=E4M3, rhs_dtype=E4M3, seed=0):
    rng = np.random.default_rng(seed)
    lhs, rhs = rng.normal(size=(m, k)), rng.normal(size=(n, k))
    # By the reference, which has nothing to compile for each shape.
    quantized = lambda x, block, dtype: ScaledArray(
        *map(jnp.asarray, reference.quantize(x, block, fmt=dtype)), None, block
    )
    return quantized(lhs, (1, 128), lhs_dtype), quantized(rhs, KINDS[kind], rhs_dtype)


def truth(lhs, rhs, accum=None):
    lhs, rhs = (reference.dequantize(x.values, x.scale, x.block) for x in (lhs, rhs))
    return lhs @ rhs.T + (0 if accum is None else np.asarray(accum, np.float64))


SMALL = {name: shape for name, shape in shapes.AWKWARD.items() if shape.n * shape.k < 1 << 18}


@pytest.mark.parametrize(
    "shape, kind",
    [pytest.param(shape, "1d2d", id=f"1d2d {name}") for name, shape in shapes.AWKWARD.items()]
    + [pytest.param(shape, "1d1d", id=f"1d1d {name}") for name, shape in SMALL.items()],
)
def test_against_float64(shape, kind):
    lhs, rhs = operands(*shape, kind)
    assert_close(
        scaled_matmul(lhs, rhs, out_dtype=jnp.float32), truth(lhs, rhs), jnp.float32, SCALED_PRODUCT
    )


@pytest.mark.parametrize("lhs_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("rhs_dtype", [E4M3, E5M2])
def test_formats_mix_and_bf16_is_the_default(lhs_dtype, rhs_dtype):
    lhs, rhs = operands(65, 130, 300, "1d1d", lhs_dtype, rhs_dtype)
    assert_close(scaled_matmul(lhs, rhs), truth(lhs, rhs), jnp.bfloat16, SCALED_PRODUCT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["xla", "emulate"])
def test_scales_are_applied_in_the_order_of_the_kernel(kind, implementation):
    """One k-block and exact block sums: each product of the order is rounded once."""
    rng = np.random.default_rng(1)
    m, n = 33, 136
    lhs, rhs = np.zeros((m, 128), E4M3), np.zeros((n, 128), E4M3)
    lhs[:, 0], rhs[:, 0] = rng.integers(1, 16, m), rng.integers(1, 16, n)
    scales = [rng.uniform(0.5, 1, (rows, 1)).astype(np.float32) for rows in (m, n)]
    if kind == "1d2d":
        scales[1] = scales[1][:2]
    out = scaled_matmul(
        ScaledArray(jnp.asarray(lhs), jnp.asarray(scales[0])),
        ScaledArray(jnp.asarray(rhs), jnp.asarray(scales[1]), None, KINDS[kind]),
        out_dtype=jnp.float32,
        implementation=implementation,
    )
    sums = lhs.astype(np.float32) @ rhs.astype(np.float32).T
    lhs_scale = scales[0]
    if kind == "1d1d":
        rhs_scale = scales[1].T
        expected, other = rhs_scale * (lhs_scale * sums), lhs_scale * rhs_scale * sums
    else:
        rhs_scale = np.repeat(scales[1], 128, axis=0)[:n].T
        expected, other = lhs_scale * rhs_scale * sums, rhs_scale * (lhs_scale * sums)
    reference.assert_same_bits(out, expected)
    assert np.any(expected != other)


@pytest.mark.parametrize("kind", KINDS)
def test_small_integers_and_power_of_two_scales_are_exact(kind):
    rng = np.random.default_rng(0)
    m, n, k = 33, 136, 400
    block = KINDS[kind]
    integers = lambda *shape: jnp.asarray(rng.integers(-8, 9, shape), jnp.float32).astype(E4M3)
    powers = lambda *shape: jnp.asarray(2.0 ** rng.integers(-3, 4, shape), jnp.float32)
    lhs = ScaledArray(integers(m, k), powers(m, 4))
    rhs = ScaledArray(integers(n, k), powers(n if kind == "1d1d" else 2, 4), None, block)
    expected = truth(lhs, rhs)
    np.testing.assert_array_equal(scaled_matmul(lhs, rhs, out_dtype=jnp.float32), expected)
    accum = jnp.asarray(rng.integers(-99, 99, (m, n)), jnp.float32)
    out = scaled_matmul(lhs, rhs, out_dtype=jnp.float32, accumulate_into=accum)
    np.testing.assert_array_equal(out, expected + np.asarray(accum))


def test_bf16_is_the_f32_result_rounded_once():
    lhs, rhs = operands(64, 64, 512)
    out = scaled_matmul(lhs, rhs, out_dtype=jnp.float32)
    np.testing.assert_array_equal(scaled_matmul(lhs, rhs), out.astype(jnp.bfloat16))


def test_accumulates_into_a_donated_buffer():
    lhs, rhs = operands(16, 24, 300)
    accum = np.random.default_rng(1).normal(size=(16, 24)).astype(np.float32)
    add = jax.jit(
        lambda accum: scaled_matmul(lhs, rhs, out_dtype=jnp.float32, accumulate_into=accum),
        donate_argnums=0,
    )
    donated = jnp.array(accum)
    assert_close(add(donated), truth(lhs, rhs, accum), jnp.float32, SCALED_PRODUCT)
    assert donated.is_deleted()


@pytest.mark.parametrize("shape", [(0, 8, 128), (8, 0, 128), (8, 8, 0)], ids=["m", "n", "k"])
def test_empty_extents(shape):
    lhs, rhs = operands(*shape)
    np.testing.assert_array_equal(scaled_matmul(lhs, rhs), np.zeros(shape[:2], jnp.bfloat16))
    accum = jnp.ones(shape[:2])
    out = scaled_matmul(lhs, rhs, out_dtype=jnp.float32, accumulate_into=accum)
    np.testing.assert_array_equal(out, accum)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_block_makes_its_row_nan_and_no_other(kind):
    lhs, rhs = operands(8, 16, 300, kind)
    values = np.array(lhs.dequantize())
    values[3, 200] = np.inf
    out = np.asarray(scaled_matmul(quantize(jnp.asarray(values)), rhs, out_dtype=jnp.float32))
    assert np.all(np.isnan(out[3])) and not np.any(np.isnan(np.delete(out, 3, 0)))


def stacked(kind, batch=3, m=20, n=24, k=300):
    pairs = [operands(m, n, k, kind, seed=seed) for seed in range(batch)]
    lhs, rhs = (jax.tree.map(lambda *x: jnp.stack(x), *side) for side in zip(*pairs, strict=True))
    return pairs, lhs, rhs


# n = 24: a 128x128 block would span two elements.
@pytest.mark.parametrize("kind, n", [("1d2d", 24), ("1d2d", 256), ("1d1d", 24)])
def test_vmap_over_either_or_both_operands(kind, n):
    pairs, lhs, rhs = stacked(kind, n=n)
    both = jax.vmap(scaled_matmul)(lhs, rhs)
    left = jax.vmap(scaled_matmul, in_axes=(0, None))(lhs, pairs[0][1])
    right = jax.vmap(scaled_matmul, in_axes=(None, 0))(pairs[0][0], rhs)
    for i, (lhs_i, rhs_i) in enumerate(pairs):
        assert_close(both[i], truth(lhs_i, rhs_i), jnp.bfloat16, SCALED_PRODUCT)
        assert_close(left[i], truth(lhs_i, pairs[0][1]), jnp.bfloat16, SCALED_PRODUCT)
        assert_close(right[i], truth(pairs[0][0], rhs_i), jnp.bfloat16, SCALED_PRODUCT)


@pytest.mark.parametrize("axes", [(0, None, 1), (None, 0, None), (0, 0, 2), (None, None, 0)])
def test_vmap_with_an_accumulator(axes):
    pairs, lhs, rhs = stacked("1d2d")
    accum = np.random.default_rng(5).normal(size=(3, 20, 24)).astype(np.float32)
    lhs_axis, rhs_axis, accum_axis = axes
    args = (
        pairs[0][0] if lhs_axis is None else lhs,
        pairs[0][1] if rhs_axis is None else rhs,
        jnp.asarray(accum[0] if accum_axis is None else np.moveaxis(accum, 0, accum_axis)),
    )
    call = lambda l, r, a: scaled_matmul(l, r, out_dtype=jnp.float32, accumulate_into=a)
    out = jax.vmap(call, in_axes=axes)(*args)
    for i in range(3):
        lhs_i, rhs_i, accum_i = (0 if axis is None else i for axis in axes)
        expected = truth(pairs[lhs_i][0], pairs[rhs_i][1], accum[accum_i])
        assert_close(out[i], expected, jnp.float32, SCALED_PRODUCT)


def test_vmap_over_an_unbatched_scale():
    lhs, rhs = operands(8, 16, 256)
    values = jnp.stack([lhs.values] * 2)
    call = lambda values: scaled_matmul(ScaledArray(values, lhs.scale), rhs)
    np.testing.assert_array_equal(jax.vmap(call)(values)[1], scaled_matmul(lhs, rhs))


LHS, RHS = (8, 256), (16, 256)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            lambda l, r: (l, operands(8, 16, 128)[1], {}),
            ValueError,
            r"lhs and rhs must share k; got k=256 in lhs f8e4m3fn\[8,256\], "
            r"k=128 in rhs f8e4m3fn\[16,128\]",
        ),
        (
            lambda l, r: (ScaledArray(l.values, l.scale[:, :1]), r, {}),
            ValueError,
            r"lhs_scale must be f32\[8,2\] .*; got f32\[8,1\]",
        ),
        (
            lambda l, r: (l, ScaledArray(r.values, r.scale, None, (1, 128)), {}),
            ValueError,
            r"rhs_scale must be f32\[16,2\] .*1x128 block.*; got f32\[1,2\]",
        ),
        (lambda l, r: (r, r, {}), ValueError, r"lhs.block must be \(1, 128\); got \(128, 128\)"),
        (lambda l, r: (l.values, r, {}), TypeError, r"lhs must be a ScaledArray; got f8e4m3fn"),
        (
            lambda l, r: (jax.tree.map(lambda x: x[None], l), r, {}),
            ValueError,
            r"lhs must be \(m, k\); got lhs f8e4m3fn\[1,8,256\].*vmap",
        ),
        (
            lambda l, r: (l, r, dict(out_dtype=jnp.float16)),
            TypeError,
            "out_dtype must be bf16 or f32; got f16",
        ),
        (
            lambda l, r: (l, r, dict(accumulate_into=jnp.ones((8, 16)))),
            ValueError,
            "accumulate_into must go with out_dtype float32; got out_dtype bf16",
        ),
        (
            lambda l, r: (l, r, dict(accumulate_into=jnp.ones((8, 8)), out_dtype=jnp.float32)),
            ValueError,
            r"accumulate_into must be f32\[8,16\]; got f32\[8,8\]",
        ),
        (
            lambda l, r: (l, r, dict(implementation="gpu")),
            ValueError,
            "implementation must be None, 'cuda', 'xla' or 'emulate'; got 'gpu'",
        ),
    ],
)
def test_bad_input_is_told_at_trace_time(change, error, message):
    lhs, rhs, kwargs = change(*operands(8, 16, 256))
    with raises(error, match="scaled_matmul: " + message):
        jax.eval_shape(functools.partial(scaled_matmul, **kwargs), lhs, rhs)


def test_differentiation_points_to_matmul():
    lhs, rhs = operands(8, 16, 256)
    loss = lambda scale: scaled_matmul(ScaledArray(lhs.values, scale), rhs).sum()
    with raises(NotImplementedError, match="gemm: matmul, .* are differentiable once"):
        jax.grad(loss)(lhs.scale)
