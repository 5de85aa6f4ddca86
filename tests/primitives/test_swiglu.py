"""SwiGLU and its gradient, quantised: bits where sigma is exact, nearest FP8 values elsewhere."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import on_cpu, raises, raises_without_kernel
from jax.interpreters import partial_eval
from xla_options import AS_USERS_DO

from jax_fp8gemm._primitives.swiglu_quantize import swiglu_grad_quantize, swiglu_quantize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FORMATS = list(itertools.product([E4M3, E5M2], [False, True]))
M, F = 200, 96  # the second scale block of 2 f holds gates and ups
SIZES, FIRST_ROW = (70, 0, 90), 7  # 40 rows of no group, before and after


def quantized(gate_up, *dh, sizes=SIZES, with_columns=True, dtype=E4M3, pow2=False, **kwargs):
    """(rows, columns) of swiglu_quantize, or of swiglu_grad_quantize where there is a dh."""
    function = swiglu_grad_quantize if dh else swiglu_quantize
    groups = jnp.asarray(sizes, jnp.int32), jnp.full((1,), FIRST_ROW, jnp.int32)
    args = dict(with_columns=with_columns, dtype=dtype, pow2_scale=pow2, implementation=None)
    return function(jnp.asarray(gate_up), *map(jnp.asarray, dh), *groups, **args | kwargs)


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def activation(gate_up, dh=None, sigma=None):
    """h, or [dgate, dup], in the precision of sigma; sigma is computed in float64 if not given."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    sigma = 1 / (1 + np.exp(-gate)) if sigma is None else sigma
    gate, up = gate.astype(sigma.dtype), up.astype(sigma.dtype)
    silu = gate * sigma
    if dh is None:
        return silu * up
    dh = dh.astype(sigma.dtype)
    return np.concatenate([dh * up * (sigma + silu * (1 - sigma)), dh * silu], axis=1)


def saturated(dtype):
    """gate_up and sigma with gates of at least 100: sigma is exactly 0 or 1 in f32."""
    gate, up = np.split(normal(M, 2 * F), 2, axis=1)
    gate = np.copysign(100 + 10 * np.abs(gate), gate)
    gate_up = np.concatenate([gate, up], axis=1).astype(dtype)
    return gate_up, (gate > 0).astype(np.float32)


def assert_bits(q, values, scale):
    assert q.block == (1, 128)
    reference.assert_same_bits(q.scale, scale, "scale")
    reference.assert_same_bits(q.values, values, "values")


@pytest.mark.parametrize(
    "x_dtype, dtype, pow2",
    [(jnp.bfloat16, *fmt) for fmt in FORMATS] + [(jnp.float32, E4M3, False)],
)
@pytest.mark.parametrize("is_grad", [False, True])
def test_bits_where_sigma_is_exact(is_grad, x_dtype, dtype, pow2):
    gate_up, sigma = saturated(x_dtype)
    dh = [normal(M, F, dtype=x_dtype, seed=1)] if is_grad else []
    function = functools.partial(quantized, dtype=dtype, pow2=pow2)
    # As in test_quantize.py.
    rows, columns = jax.jit(function, compiler_options=AS_USERS_DO)(gate_up, *dh)
    x = activation(gate_up, *dh, sigma=sigma)
    assert_bits(rows, *reference.quantize(x, fmt=dtype, pow2=pow2))
    assert_bits(columns, *reference.quantize_ragged(x, SIZES, dtype, pow2, FIRST_ROW))


def assert_nearest(values, scale, x):
    """Scales of x and FP8 values nearest to x, x in float64, whatever the last bits of x in f32."""
    values, scale = np.asarray(values), np.asarray(scale, np.float64)
    _, expected = reference.quantize(x)
    np.testing.assert_allclose(scale, expected, rtol=1e-6)  # some f32 roundings
    scaled = x / np.repeat(scale, 128, axis=1)[:, : x.shape[1]]
    # Half a step of the e4m3 grid, whose smallest normal value is 2^-6.
    exponent = np.maximum(np.frexp(scaled)[1] - 1, -6)
    half = np.exp2(exponent - 4.0)
    # And the error of x in f32: 2^-20 of it.
    error = np.abs(values.astype(np.float64) - scaled)
    assert np.all(error <= half + 2.0**-20 * np.abs(scaled))


@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("is_grad", [False, True])
def test_values_are_the_nearest_to_swiglu_in_float64(is_grad, x_dtype):
    gate_up = 4 * normal(M, 2 * F, dtype=x_dtype)
    dh = [normal(M, F, dtype=x_dtype, seed=1)] if is_grad else []
    rows, columns = quantized(gate_up, *dh)
    x = activation(gate_up, *dh)
    assert_nearest(rows.values, rows.scale, x)
    start = 0
    for first, last in reference.row_ranges(SIZES, M, FIRST_ROW):
        size = last - first
        group = slice(start, start + size), slice(start // 128, -(-(start + size) // 128))
        values, scale = columns.values[:, group[0]], columns.scale[:, group[1]]
        assert_nearest(values, scale, x[first:last].T)
        start += -(-size // 128) * 128


def test_the_gradient_is_that_of_silu():
    gate_up, dh = 3 * normal(M, 2 * F), normal(M, F, seed=1)
    swiglu = lambda x: jax.nn.silu(x[:, :F]) * x[:, F:]
    with jax.enable_x64(True):
        h, pullback = jax.vjp(swiglu, jnp.asarray(gate_up, jnp.float64))
        (expected,) = pullback(jnp.asarray(dh, jnp.float64))
    # float64 on both sides: some ulps of exp, and dh's differences cancel where silu' is near 0.
    np.testing.assert_allclose(activation(gate_up), h, rtol=1e-12)
    np.testing.assert_allclose(activation(gate_up, dh), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_grad", [False, True])
def test_rows_of_no_group_reach_no_column(is_grad):
    gate_up, dh = normal(M, 2 * F), [normal(M, F, seed=1)] if is_grad else []
    _, expected = quantized(gate_up, *dh)
    for x in (gate_up, *dh):
        x[:FIRST_ROW] = x[FIRST_ROW + sum(SIZES) :] = np.nan
    rows, columns = quantized(gate_up, *dh)
    assert_bits(columns, expected.values, expected.scale)
    is_nan = np.isnan(rows.dequantize()).any(axis=1)
    np.testing.assert_array_equal(is_nan, np.isnan(gate_up[:, 0]))


@pytest.mark.parametrize("is_grad", [False, True])
def test_a_nan_makes_its_blocks_nan_and_no_other(is_grad):
    gate_up, dh = normal(M, 2 * F), [normal(M, F, seed=1)] if is_grad else []
    gate_up[100, F + 3] = np.nan  # an up: h, or dgate
    rows, columns = quantized(gate_up, *dh)
    is_nan = np.isnan(rows.dequantize())
    expected = np.zeros_like(is_nan)
    expected[100, :128] = True
    np.testing.assert_array_equal(is_nan, expected)
    is_nan = np.isnan(columns.dequantize())
    expected = np.zeros_like(is_nan)
    expected[3, 128:256] = True  # the third group, rows 77 to 166
    np.testing.assert_array_equal(is_nan, expected)


def _mode_after_dce(function, *operands):
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return jaxpr.eqns[-1].params["mode"]


@pytest.mark.parametrize("is_grad", [False, True])
def test_only_what_is_used_is_quantised(is_grad):
    operands = normal(M, 2 * F), *([normal(M, F, seed=1)] if is_grad else [])
    both = quantized(*operands)
    rows, columns = (lambda *x, i=i: quantized(*x)[i] for i in range(2))
    assert _mode_after_dce(quantized, *operands) == "row_column"
    for function, mode, expected in ((rows, "row", both[0]), (columns, "column", both[1])):
        assert _mode_after_dce(function, *operands) == mode
        x = jax.jit(function)(*operands)
        # Fused by itself: of sigma, the last bits may differ.
        assert reference.calc_diff(x.dequantize(), expected.dequantize()) < 1e-6
    alone, none = quantized(*operands, with_columns=False)
    assert none is None
    assert reference.calc_diff(alone.dequantize(), both[0].dequantize()) < 1e-6


@pytest.mark.parametrize("is_grad", [False, True])
@pytest.mark.parametrize("shape", [(0, 6), (5, 0), (5, 2)])
def test_small_arrays(shape, is_grad):
    gate_up = normal(*shape)
    dh = [normal(shape[0], shape[1] // 2, seed=1)] if is_grad else []
    rows, columns = quantized(gate_up, *dh, sizes=(shape[0], 3))
    x = activation(gate_up, *dh)
    assert (rows.shape, columns.shape) == (x.shape, (x.shape[1], (shape[0] + 254) // 128 * 128))
    assert reference.calc_diff(rows.dequantize(), x) < 1e-3


@pytest.mark.parametrize("is_grad", [False, True])
def test_vmap(is_grad):
    operands = [np.stack([saturated(jnp.bfloat16)[0]] * 2)]
    operands[0][1] *= -1
    operands += [normal(2, M, F, dtype=jnp.bfloat16)] if is_grad else []
    sizes = np.array([SIZES, (0, 128, 20)], np.int32)
    function = lambda sizes, *operands: quantized(*operands, sizes=sizes)
    mapped = jax.vmap(function)(*map(jnp.asarray, (sizes, *operands)))
    for i in range(2):
        expected = quantized(*(x[i] for x in operands), sizes=sizes[i])
        jax.tree.map(lambda x, y, i=i: reference.assert_same_bits(x[i], y), mapped, expected)


@pytest.mark.parametrize(
    "gate_up, dh, error, message",
    [
        (np.ones(6, np.float32), [], ValueError, r"gate_up must be \(m, 2 f\); got gate_up f32\[6"),
        (np.ones((2, 5), np.float32), [], ValueError, r"\(m, 2 f\); got gate_up f32\[2,5\]"),
        (np.ones((2, 6), np.int32), [], TypeError, r"gate_up must be bf16 or f32; got gate_up s32"),
        (
            np.ones((2, 6), np.float32),
            [np.ones((2, 6), np.float32)],
            ValueError,
            r"swiglu_grad_quantize: dh must be f32\[2,3\]; got f32\[2,6\]",
        ),
    ],
)
def test_bad_operands_raise(gate_up, dh, error, message):
    with raises(error, match=message):
        quantized(gate_up, *dh)


@pytest.mark.parametrize("is_grad", [False, True])
@pytest.mark.parametrize("with_columns", [False, True])
def test_it_is_one_custom_call_on_cuda(with_columns, is_grad):
    operands = [normal(M, 2 * F, dtype=jnp.bfloat16), *[normal(M, F, dtype=jnp.bfloat16)] * is_grad]
    function = lambda *x: quantized(*x, dtype=E5M2, with_columns=with_columns)
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    ((target, line),) = re.findall(r"custom_call @(jax_fp8gemm_\w+)\((.*)", text)
    assert target == f"jax_fp8gemm_swiglu_{'grad_' * is_grad}quantize"
    config = {name: int(value) for name, value in re.findall(r"(\w+) = (\d) : i32", line)}
    assert all(config.pop(name) == 0 for name in ("activation", "limit", "alpha", "up_offset"))
    mode, source = 2 if with_columns else 0, 2 if is_grad else 1
    flags = dict(input=0, e5m2=1, pow2_scale=0, ragged=1, padded=0, paired=0)
    assert config == dict(mode=mode, source=source, **flags)
    # Values with rows major, scales with rows minor; group_sizes and first_row.
    layouts = [f"dense<[{x}]> : tensor<2xindex>" for x in ("1, 0", "0, 1") * (1 + with_columns)]
    assert f"result_layouts = [{', '.join(layouts)}]" in line
    assert line.count("tensor<2xindex>") == 1 + is_grad + len(layouts)
    assert line.count("tensor<1xindex>") == 2


# 264 pairs of tiles: one for each CTA of 132 multiprocessors.
@pytest.mark.parametrize(
    "m, f, dtype, paired",
    [
        (33 * 128, 8 * 128, jnp.bfloat16, 1),
        (32 * 128 + 1, 8 * 128, jnp.bfloat16, 1),
        (32 * 128, 8 * 128, jnp.bfloat16, 0),
        (33 * 128, 9 * 128 - 16, jnp.bfloat16, 0),
        (33 * 128, 8 * 128, jnp.float32, 0),
    ],
)
def test_large_gradients_take_tiles_in_pairs(m, f, dtype, paired):
    function = functools.partial(
        swiglu_grad_quantize, with_columns=False, dtype=E4M3, pow2_scale=False, implementation=None
    )
    operands = [jax.ShapeDtypeStruct((m, width), dtype) for width in (2 * f, f)]
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"paired = (\d) : i32", text) == [str(paired)]


def test_the_primitives_have_no_derivative():
    gate_up = jnp.ones((4, 6))
    with raises(NotImplementedError, match="swiglu_quantize: matmul, .* are differentiable once"):
        jax.grad(lambda x: quantized(x)[0].scale.sum())(gate_up)


@on_cpu
def test_the_kernels_are_refused_on_cpu():
    with raises_without_kernel("swiglu_quantize"):
        quantized(jnp.ones((4, 6)), implementation="cuda")
