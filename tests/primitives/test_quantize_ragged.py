"""Every bit of quantisation along the tokens of each group, against each group quantised alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import on_cpu, raises, raises_without_kernel
from grouped_cases import BAD_SIZES, int32, patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.interpreters import partial_eval
from xla_options import AS_USERS_DO

from jax_fp8gemm import quantize_ragged
from jax_fp8gemm._primitives.quantize_ragged import ragged_columns, rows_and_ragged_columns

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FORMATS = list(itertools.product([E4M3, E5M2], [False, True]))


def wide(*shape, dtype=np.float32, seed=0):
    """Normal, times e^-24..4: blocks whose small values are denormals of the format."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.uniform(-24, 4, size=shape))).astype(dtype)


def assert_quantized(q, x, sizes, dtype=E4M3, pow2=False, first_row=0):
    values, scale = reference.quantize_ragged(x, sizes, dtype, pow2, first_row)
    assert q.block == (1, 128)
    reference.assert_same_bits(q.scale, scale, "scale")
    reference.assert_same_bits(q.values, values, "values")


@patterns
def test_bits_of_all_patterns(m, sizes):
    x = wide(m, 140)
    assert_quantized(quantize_ragged(jnp.asarray(x), int32(sizes)), x, sizes)


@pytest.mark.parametrize(
    "x_dtype, dtype, pow2",
    [(jnp.float32, *fmt) for fmt in FORMATS]
    + [(jnp.bfloat16, E4M3, False), (jnp.float16, E5M2, True)],
)
def test_bits_of_all_formats(x_dtype, dtype, pow2):
    x, sizes = wide(300, 36, dtype=x_dtype), (130, 0, 3, 129)
    q = quantize_ragged(jnp.asarray(x), int32(sizes), dtype=dtype, pow2_scale=pow2)
    assert_quantized(q, x, sizes, dtype, pow2)


@pytest.mark.parametrize("k", [0, 1, 128, 257])
def test_any_number_of_columns(k):
    x, sizes = wide(140, k), (5, 131)
    assert_quantized(quantize_ragged(jnp.asarray(x), int32(sizes)), x, sizes)


def test_no_rows():
    x = wide(0, 5)
    assert_quantized(quantize_ragged(jnp.asarray(x), int32([3])), x, [3])


def _args(dtype, pow2_scale=False):
    return dict(dtype=dtype, pow2_scale=pow2_scale, implementation=None)


jitted_columns = jax.jit(
    lambda *args: ragged_columns(*args, **_args(E4M3)),
    compiler_options=AS_USERS_DO,  # as in test_quantize.py
)


def columns_from(first_row, x, sizes):
    return jitted_columns(jnp.asarray(x), int32(sizes), jnp.full((1,), first_row, jnp.int32))


@given(
    sizes=st.lists(st.integers(-1, 140) | st.integers(-(2**31), 2**31 - 1), min_size=6, max_size=6),
    first_row=st.just(0) | st.integers(-1, 271),
)
@settings(max_examples=60, deadline=None)
def test_bits_of_any_sizes(sizes, first_row):
    x = wide(270, 5)
    assert_quantized(columns_from(first_row, x, sizes), x, sizes, first_row=first_row)


@pytest.mark.parametrize("bad", [np.inf, -np.nan])
def test_bad_values_in_rows_of_no_group_reach_nothing(bad):
    x, sizes = wide(270, 36), (60, 0, 130)
    x[:10] = x[200:] = bad
    q = columns_from(10, x, sizes)
    assert_quantized(q, x, sizes, first_row=10)
    assert np.all(np.isfinite(q.dequantize()))


@pytest.mark.parametrize("bad", [np.inf, -np.nan])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_bad_value_makes_its_block_nan_and_no_other(dtype, bad):
    x, sizes = wide(270, 36), (60, 130, 80)
    x[70, 7] = bad
    q = quantize_ragged(jnp.asarray(x), int32(sizes), dtype=dtype)
    assert_quantized(q, x, sizes, dtype)
    expected = np.zeros(q.shape, bool)
    expected[7, 128:256] = True  # rows 60 to 187
    np.testing.assert_array_equal(np.isnan(q.dequantize()), expected)


def test_columns_of_no_row_are_zeros_with_a_finite_scale():
    q = quantize_ragged(jnp.ones((270, 3)), int32((60, 0, 130)))
    rest = np.r_[60:128, 258:512]
    assert np.all(np.asarray(q.values)[:, rest].view(np.uint8) == 0)
    np.testing.assert_array_equal(q.scale[:, 3:], np.float32(2.0**-92) / np.float32(448))


@pytest.mark.parametrize("first_row", [0, 7])
def test_rows_and_columns_equal_their_two_halves(first_row):
    x, sizes = wide(200, 140, dtype=jnp.bfloat16), (70, 0, 60)
    operands = jnp.asarray(x), int32(sizes), jnp.full((1,), first_row, jnp.int32)
    rows, columns = rows_and_ragged_columns(*operands, **_args(E5M2, pow2_scale=True))
    values, scale = reference.quantize(x, fmt=E5M2, pow2=True)
    reference.assert_same_bits(rows.values, values)
    reference.assert_same_bits(rows.scale, scale)
    assert_quantized(columns, x, sizes, E5M2, True, first_row)


def test_rows_that_nothing_uses_are_not_quantised():
    first_row = jnp.zeros((1,), jnp.int32)
    both = lambda *args: rows_and_ragged_columns(*args, first_row, **_args(E4M3))
    mode = lambda function: _equation_after_dce(function).params["mode"]
    assert mode(both) == "row_column"
    assert mode(lambda *args: both(*args)[0]) == "row"
    assert mode(lambda *args: both(*args)[1]) == "column"
    x, sizes = wide(140, 5), (9, 130)
    columns = jax.jit(lambda *args: both(*args)[1])(jnp.asarray(x), int32(sizes))
    assert_quantized(columns, x, sizes)


def _equation_after_dce(function):
    jaxpr = jax.make_jaxpr(function)(jnp.zeros((4, 5)), int32([4])).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return jaxpr.eqns[-1]


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (2, 1)])
def test_vmap(in_axes):
    x, sizes = wide(3, 140, 20), np.array([(9, 130), (0, 140), (70, 5)])
    place = lambda x, axis: x[0] if axis is None else np.moveaxis(x, 0, axis)
    args = jnp.asarray(place(x, in_axes[0])), int32(place(sizes, in_axes[1]))
    q = jax.vmap(quantize_ragged, in_axes)(*args)
    element = lambda x, axis, i: x[0] if axis is None else x[i]
    for i in range(3):
        expected = element(x, in_axes[0], i), element(sizes, in_axes[1], i)
        assert_quantized(jax.tree.map(lambda leaf, i=i: leaf[i], q), *expected)


def test_scan_over_group_sizes():
    x, sizes = wide(140, 20), np.array([(9, 130), (0, 140), (70, 5)])
    step = lambda carry, sizes: (carry, quantize_ragged(jnp.asarray(x), sizes))
    _, q = jax.lax.scan(step, None, int32(sizes))
    for i in range(3):
        assert_quantized(jax.tree.map(lambda leaf, i=i: leaf[i], q), x, sizes[i])


def test_int64_sizes():
    x, sizes = wide(140, 20), (9, -(2**40), 2**40, 5)
    with jax.enable_x64(True):
        q = quantize_ragged(jnp.asarray(x), jnp.asarray(np.array(sizes)))
    assert_quantized(q, x, sizes)


def test_export_round_trip():
    x, sizes = wide(140, 20), (9, 120)
    leaves = lambda *args: jax.tree.leaves(quantize_ragged(*args))
    exported = jax.export.export(jax.jit(leaves))(jnp.asarray(x), int32(sizes))
    found = jax.export.deserialize(exported.serialize()).call(jnp.asarray(x), int32(sizes))
    for leaf, expected in zip(found, reference.quantize_ragged(x, sizes), strict=True):
        reference.assert_same_bits(leaf, expected)


@pytest.mark.parametrize(
    "args, error, message",
    [
        (dict(x=jnp.ones((2, 2), jnp.int32)), TypeError, r"x must be bf16, f16 or f32; got x s32"),
        (dict(x=[[1.0]]), TypeError, "x must be an array; got list"),
        (dict(x=jnp.ones((2, 2, 2))), ValueError, r"x must be \(m, k\); got x f32\[2,2,2\].*vmap"),
        *BAD_SIZES,
        (
            dict(group_sizes=jnp.zeros(1025, jnp.int32)),
            ValueError,
            r"group_sizes must have 1 to 1024 groups; got group_sizes s32\[1025\]",
        ),
        (dict(dtype=jnp.bfloat16), TypeError, "dtype must be f8e4m3fn or f8e5m2; got bf16"),
        (
            dict(implementation="triton"),
            ValueError,
            "None, 'cuda', 'xla' or 'emulate'; got 'triton'",
        ),
    ],
)
def test_bad_input_is_told_at_trace_time(args, error, message):
    args = dict(x=jnp.ones((2, 2)), group_sizes=int32([2])) | args
    with raises(error, match="quantize_ragged: .*" + message):
        quantize_ragged(**args)


@on_cpu
def test_cuda_implementation_raises_on_cpu():
    with raises_without_kernel("quantize_ragged"):
        quantize_ragged(jnp.ones((2, 2)), int32([2]), implementation="cuda")


def test_is_not_differentiable():
    loss = lambda x: quantize_ragged(x, int32([2])).dequantize().sum()
    with raises(NotImplementedError, match="quantize_ragged: matmul, .* are differentiable once"):
        jax.grad(loss)(jnp.ones((2, 2)))


def test_no_rows_and_several_groups():
    q = quantize_ragged(jnp.zeros((0, 5)), int32((1, 2)))
    values, scale = reference.quantize_ragged(np.zeros((0, 5), np.float32), (1, 2))
    reference.assert_same_bits(q.values, values)
    reference.assert_same_bits(q.scale, scale)


def test_a_nan_block_is_nan_to_its_end():
    x = np.ones((5, 3), np.float32)
    x[2, 1] = np.nan
    values, scale = reference.quantize_ragged(x, (5,))
    q = quantize_ragged(jnp.asarray(x), int32((5,)))
    reference.assert_same_bits(q.values, values)
    reference.assert_same_bits(q.scale, scale)
