"""Numerics of the GEMM kernels on real and awkward shapes: exact cases, then DeepGEMM's bounds."""

import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import shapes
from assertions import GPU_DEQUANTIZED, GPU_UNQUANTIZED
from gpu_cases import E4M3, E5M2, FAMILIES
from jax import lax

import jax_fp8gemm as jf

pytestmark = pytest.mark.gpu

# A single element: the rounding of bf16 (2^-9) twice over, plus 1 % of the rms of the result, where
# 13-bit truncation was seen to cost 0.06 %. A wrong tile or scale is off by about the rms.
OUT_ROUNDING, RMS_SHARE = 2.0**-8, 0.01
out_dtypes = pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
families = pytest.mark.parametrize("family", FAMILIES)


def _dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """lhs . rhs^T in true f32: 1e-6 of the rms at k = 32768, far below every bound here."""
    return lax.dot_general(
        lhs.astype(jnp.float32),
        rhs.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )


def _diff(x: jax.Array, y: jax.Array) -> jax.Array:
    """calc_diff, written as |x - y|^2 / (|x|^2 + |y|^2), which f32 can compute."""
    x = x.astype(jnp.float32)
    return jnp.sum((x - y) ** 2) / (jnp.sum(x**2) + jnp.sum(y**2))


def _excess(x: jax.Array, y: jax.Array) -> jax.Array:
    """The worst element's error beyond rounding, as a share of the rms."""
    error = jnp.abs(x.astype(jnp.float32) - y) - OUT_ROUNDING * jnp.abs(y)
    return jnp.max(error) / jnp.sqrt(jnp.mean(y**2))


@functools.partial(
    jax.jit,
    static_argnames=("shape", "ms", "rhs_block", "out_dtype"),
    compiler_options=gpu_cases.COMPILER_OPTIONS,
)
def _measure(shape, ms, rhs_block, out_dtype):
    """For each of ms, the first rows: both diffs, the worst element, bits unlike the last m's."""
    m, n, k = shape
    keys = jax.random.split(jax.random.key(m + n + k))
    lhs, rhs = (
        jax.random.normal(key, (rows, k), jnp.bfloat16)
        for key, rows in zip(keys, (m, n), strict=True)
    )
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    lhs_q = jf.quantize(lhs, implementation=gpu_cases.IMPLEMENTATION)
    rhs_q = jf.quantize(rhs, block=rhs_block, implementation=gpu_cases.IMPLEMENTATION)
    exact, kept = _dot(lhs, rhs), _dot(lhs_q.dequantize(), rhs_q.dequantize())
    outs = [gpu_cases.multiply(gpu_cases.rows_of(lhs_q, rows), rhs_q, out_dtype) for rows in ms]
    unlike = lambda out: jnp.sum(gpu_cases.bits(out) != gpu_cases.bits(outs[-1][: len(out)]))
    return [
        (_diff(out, exact[:rows]), _diff(out, kept[:rows]), _excess(out, kept[:rows]), unlike(out))
        for rows, out in zip(ms, outs, strict=True)
    ]


def _check(shape, ms, rhs_block, out_dtype):
    for rows, measured in zip(ms, _measure(shape, ms, rhs_block, out_dtype), strict=True):
        unquantized, dequantized, excess, unlike = map(float, measured)
        what = f"m={rows} of {shape}: {unquantized=} {dequantized=} {excess=}"
        # Written so that a NaN fails.
        assert unquantized < GPU_UNQUANTIZED, what
        assert dequantized < GPU_DEQUANTIZED, what
        assert excess < RMS_SHARE, what
        assert unlike == 0, f"{what}: {unlike} elements unlike those at m={ms[-1]}"


@pytest.mark.parametrize("nk", shapes.DEEPGEMM_NK, ids=str)
def test_deepgemm_forward_shapes(nk):
    """m = 1, 128 and 4096, and others; the bits of a row do not depend on m.

    Scales of 12, 36 and 100 rows are copied in another way than those of 128.
    """
    ms = (*shapes.DEEPGEMM_M[:2], 12, 36, 65, 100, shapes.DEEPGEMM_M[-1])
    _check(shapes.Shape(max(ms), *nk), ms, FAMILIES["1d2d"], jnp.bfloat16)


@pytest.mark.parametrize("shape", shapes.DENSE_DLHS, ids=str)
def test_deepgemm_dlhs_shapes(shape):
    _check(shape, (4000, shape.m), FAMILIES["1d2d"], jnp.bfloat16)


@pytest.mark.parametrize("shape", shapes.DENSE_DRHS, ids=str)
def test_deepgemm_drhs_shapes(shape):
    _check(shape, (shape.m,), FAMILIES["1d1d"], jnp.float32)


@families
@out_dtypes
@pytest.mark.parametrize("name", shapes.AWKWARD)
def test_awkward_shapes(name, family, out_dtype):
    """Against float64 on every element, into a poisoned buffer."""
    shape = shapes.AWKWARD[name]
    lhs, rhs = gpu_cases.operands(1, shape, FAMILIES[family])
    out_type = jax.ShapeDtypeStruct((shape.m, shape.n), out_dtype)
    out = gpu_cases.run_poisoned(
        lambda lhs, rhs: gpu_cases.multiply(lhs, rhs, out_dtype), (lhs, rhs), out_type
    )
    expected = reference.gemm(*gpu_cases.on_host(lhs), *gpu_cases.on_host(rhs))
    assert reference.calc_diff(out, expected) < GPU_DEQUANTIZED
    error = np.abs(np.asarray(out).astype(np.float64) - expected)
    rms = np.sqrt(np.mean(expected**2))
    assert np.all(error <= OUT_ROUNDING * np.abs(expected) + RMS_SHARE * rms)
    if out_dtype == jnp.float32:
        gpu_cases.assert_model_predicts(out, lhs, rhs, what=name)


@families
@out_dtypes
@pytest.mark.parametrize("shape", [(200, 264, 1000), (1, 8, 128), (129, 576, 2880)], ids=str)
def test_small_integers_with_power_of_two_scales_are_exact(shape, family, out_dtype):
    """A block sums to at most 49 * 128 < 2^13; scales of 2^-4 .. 2^4 add 8 bits, the blocks 5."""
    m, n, k = shape
    rng = np.random.default_rng(2)
    block = FAMILIES[family]
    factors = []
    for rows, scale_block in ((m, (1, 128)), (n, block)):
        values = rng.integers(-7, 8, (rows, k)).astype(np.float32).astype(E4M3)
        size = reference.scale_shape(values.shape, scale_block)
        scale = np.exp2(rng.integers(-2, 3, size)).astype(np.float32)
        factors.append((values, scale, scale_block))
    lhs, rhs = (gpu_cases.scaled(*factor) for factor in factors)
    expected = reference.gemm(*factors[0][:2], *factors[1][:2]).astype(np.float32)
    out = gpu_cases.multiply(lhs, rhs, out_dtype)
    reference.assert_same_bits(out, expected.astype(out_dtype))


@families
@pytest.mark.parametrize(
    "formats", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=lambda f: f"{f[0]}-{f[1]}"
)
def test_e5m2_operands(formats, family):
    """Against float64, and the bits against the model of these formats."""
    shape = shapes.Shape(200, 264, 1160)
    lhs, rhs = gpu_cases.operands(3, shape, FAMILIES[family], formats)
    out = gpu_cases.multiply(lhs, rhs)
    expected = reference.gemm(*gpu_cases.on_host(lhs), *gpu_cases.on_host(rhs))
    assert reference.calc_diff(out, expected) < GPU_DEQUANTIZED
    gpu_cases.assert_model_predicts(out, lhs, rhs)


@families
def test_nan_blocks_reach_their_rows_and_columns_only(family):
    """A block that held an Inf is NaN: so is what reads it, and nothing else."""
    block, n = FAMILIES[family], 264
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal((rows, 512), np.float32) for rows in (200, n))
    x[67, 300] = np.inf
    y[140, 5] = np.nan
    lhs = gpu_cases.scaled(*reference.quantize(x), gpu_cases.ROWS)
    rhs = gpu_cases.scaled(*reference.quantize(y, block), block)
    out = np.asarray(gpu_cases.multiply(lhs, rhs))
    expected = np.zeros((200, n), bool)
    expected[67] = True
    expected[:, slice(128, 256) if family == "1d2d" else 140] = True
    np.testing.assert_array_equal(np.isnan(out), expected)


@pytest.mark.parametrize("shape", [(0, 64, 128), (64, 0, 128), (64, 64, 0)], ids=str)
@out_dtypes
def test_empty_extents(shape, out_dtype):
    m, n, k = shape
    lhs = gpu_cases.scaled(*reference.quantize(np.ones((m, k), np.float32)), gpu_cases.ROWS)
    square = gpu_cases.SQUARE
    rhs = gpu_cases.scaled(*reference.quantize(np.ones((n, k), np.float32), square), square)
    out = gpu_cases.multiply(lhs, rhs, out_dtype)
    reference.assert_same_bits(out, np.zeros((m, n), out_dtype))


@families
@pytest.mark.parametrize("shape", [(128, 576, 7168), (65, 129, 1003)], ids=str)
def test_accumulates_into_its_argument(shape, family):
    """accum + result, in place where the shape needs no padding, and the bits of the model."""
    lhs, rhs = gpu_cases.operands(5, shape, FAMILIES[family])
    accum = jnp.asarray(np.random.default_rng(5).standard_normal(shape[:2], np.float32) * 50)
    before = np.asarray(accum).copy()
    address = accum.unsafe_buffer_pointer()
    add = jax.jit(
        lambda accum, lhs, rhs: gpu_cases.multiply(lhs, rhs, accum=accum), donate_argnums=0
    )
    out = add(accum, lhs, rhs)
    assert out.unsafe_buffer_pointer() == address
    plain = np.asarray(gpu_cases.multiply(lhs, rhs))
    reference.assert_same_bits(out, before + plain)
    gpu_cases.assert_model_predicts(out, lhs, rhs, accum=before)


def test_accumulating_leaves_an_argument_that_is_not_donated():
    lhs, rhs = gpu_cases.operands(6, (128, 256, 512))
    accum = jnp.ones((128, 256), jnp.float32)
    out = jax.jit(lambda accum: gpu_cases.multiply(lhs, rhs, accum=accum))(accum)
    np.testing.assert_array_equal(np.asarray(accum), 1)
    reference.assert_same_bits(out, 1 + np.asarray(gpu_cases.multiply(lhs, rhs)))


# The fallback, on the same GPU


@families
def test_reference_lowering_agrees_and_really_rounds(family):
    """Quantised and multiplied in one program, where XLA could drop the rounding to FP8."""
    rng = np.random.default_rng(7)
    lhs, rhs = (rng.standard_normal((rows, 640), np.float32) for rows in (200, 264))
    block = FAMILIES[family]

    @jax.jit
    def product(lhs, rhs):
        lhs_q = jf.quantize(lhs, implementation="xla")
        rhs_q = jf.quantize(rhs, block=block, implementation="xla")
        return jf.scaled_matmul(lhs_q, rhs_q, out_dtype=jnp.float32, implementation="xla")

    out = product(lhs, rhs)
    assert 'custom_call_target="jax_fp8gemm' not in product.lower(lhs, rhs).compile().as_text()
    kept = reference.fake_quantize(lhs) @ reference.fake_quantize(rhs, block).T
    assert reference.calc_diff(out, kept) < 1e-7
    assert 3e-4 < reference.calc_diff(out, lhs.astype(np.float64) @ rhs.T) < GPU_UNQUANTIZED
    lhs_q, rhs_q = gpu_cases.operands(7, (200, 264, 640), block)
    kernel = gpu_cases.multiply(lhs_q, rhs_q)
    plain = jf.scaled_matmul(lhs_q, rhs_q, out_dtype=jnp.float32, implementation="xla")
    assert reference.calc_diff(kernel, plain) < 1e-7
