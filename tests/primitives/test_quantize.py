"""Every bit of quantisation, against NumPy and ml_dtypes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import shapes
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from xla_options import AS_USERS_DO

from jax_fp8gemm import FallbackWarning, matmul, quantize, quantize_both
from jax_fp8gemm._primitives.quantize import quantize_transposed

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
ROWS, COLUMNS, SQUARE = ((1, 128), -1), ((1, 128), -2), ((128, 128), -1)
FORMATS = list(itertools.product([E4M3, E5M2], [False, True]))


def assert_quantized(q, x, block, axis, dtype, pow2=False):
    values, scale = reference.quantize(x, block, axis, dtype, pow2)
    reference.assert_same_bits(q.scale, scale, "scale")
    reference.assert_same_bits(q.values, values, "values")


def wide(shape, dtype=np.float32, seed=0):
    """Normal, times e^-24..24: blocks whose small values are denormals of the format."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.uniform(-24, 4, size=shape))).astype(dtype)


@pytest.mark.parametrize("shape", shapes.QUANTIZE, ids=str)
@pytest.mark.parametrize("block, axis", [ROWS, COLUMNS, SQUARE])
def test_bits_on_all_shapes(shape, block, axis):
    x = wide(shape)
    assert_quantized(quantize(jnp.asarray(x), block=block, axis=axis), x, block, axis, E4M3)


@pytest.mark.parametrize(
    "x_dtype, dtype, pow2",
    [(jnp.float32, *fmt) for fmt in FORMATS]
    + [(jnp.bfloat16, E4M3, False), (jnp.float16, E5M2, True)],
)
@pytest.mark.parametrize("block, axis", [ROWS, COLUMNS, SQUARE])
def test_bits_of_all_formats(block, axis, dtype, pow2, x_dtype):
    x = wide((130, 260), x_dtype)
    q = quantize(jnp.asarray(x), block=block, axis=axis, dtype=dtype, pow2_scale=pow2)
    assert_quantized(q, x, block, axis, dtype, pow2)


@functools.cache
def jitted(block, axis, dtype, pow2):
    return jax.jit(
        functools.partial(quantize, block=block, axis=axis, dtype=dtype, pow2_scale=pow2),
        compiler_options=AS_USERS_DO,  # no optimisation may change a bit
    )


@pytest.mark.parametrize("dtype, pow2", FORMATS)
@pytest.mark.parametrize("block, axis", [ROWS, SQUARE])
@given(bits=hnp.arrays(np.uint32, (3, 140), elements=st.integers(0, 2**32 - 1)))
@settings(max_examples=30, deadline=None)
def test_bits_of_arbitrary_floats(block, axis, dtype, pow2, bits):
    # Every f32 there is: denormals, infinities, NaNs of both signs, both zeros.
    x = bits.view(np.float32)
    assert_quantized(jitted(block, axis, dtype, pow2)(x), x, block, axis, dtype, pow2)


@pytest.mark.parametrize("dtype, pow2", FORMATS)
@given(
    values=hnp.arrays(np.float32, (1, 128), elements=st.floats(-1, 1, width=32)),
    exponent=st.integers(-126, 127),
)
@settings(max_examples=60, deadline=None)
def test_bits_of_blocks_of_one_magnitude(dtype, pow2, values, exponent):
    x = np.ldexp(values, exponent).astype(np.float32)
    assert_quantized(jitted(*ROWS, dtype, pow2)(x), x, *ROWS, dtype, pow2)


@pytest.mark.parametrize("dtype, pow2", FORMATS)
@pytest.mark.parametrize("exponent", [-100, -93, -92, -91, 0, 1, 127])
def test_scales_of_many_mantissas(exponent, dtype, pow2):
    # A division that is 1 ulp off anywhere would show: XLA likes to multiply by reciprocals.
    mantissas = np.random.default_rng(exponent + 200).integers(0, 1 << 23, 1 << 16)
    edges = [0, 1, (1 << 23) - 1, (7 << 21) - (1 << 23) - 1, (7 << 21) - (1 << 23)]
    bits = (127 + exponent << 23) | np.concatenate([edges, mantissas])
    x = bits.astype(np.uint32).view(np.float32)[:, None]
    assert_quantized(jitted(*ROWS, dtype, pow2)(x), x, *ROWS, dtype, pow2)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_ties_round_to_even_over_the_whole_grid(dtype):
    grid = np.arange(0x7F if dtype == E4M3 else 0x7C, dtype=np.uint8).view(dtype)
    grid = grid.astype(np.float32)
    halfway = (grid[1:] + grid[:-1]) / 2
    around = [np.nextafter(halfway, np.float32(side)) for side in (0, 1e9)]
    x = np.concatenate([grid, halfway, *around])
    x = np.concatenate([x, -x])
    # Blocks of 127 and FMAX: the scale is 1, and the grid is the format's.
    blocks = np.pad(x, (0, -x.size % 127)).reshape(-1, 127)
    x = np.pad(blocks, ((0, 0), (1, 0)), constant_values=grid[-1])
    q = quantize(jnp.asarray(x), dtype=dtype)
    assert np.all(q.scale == 1)
    reference.assert_same_bits(q.values, x.astype(dtype))


def test_zeros_give_zeros_and_a_finite_scale():
    q = quantize(jnp.zeros((2, 200)))
    assert np.all(np.asarray(q.values).view(np.uint8) == 0)
    assert np.all(q.scale == np.float32(2.0**-92) / np.float32(448))


@pytest.mark.parametrize("bad", [-np.inf, -np.nan])  # signs must not leak; hypothesis has the rest
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block, axis", [ROWS, COLUMNS, SQUARE])
def test_a_bad_value_makes_its_block_nan_and_no_other(block, axis, dtype, bad):
    x = wide((260, 300))
    x[130, 140] = bad
    q = quantize(jnp.asarray(x), block=block, axis=axis, dtype=dtype)
    assert_quantized(q, x, block, axis, dtype)
    is_nan = np.isnan(q.dequantize())
    expected = np.zeros(x.shape, bool)
    rows = slice(130, 131) if (block, axis) == ROWS else slice(128, 256)
    columns = slice(140, 141) if (block, axis) == COLUMNS else slice(128, 256)
    expected[rows, columns] = True
    np.testing.assert_array_equal(is_nan, expected.T if axis == -2 else expected)


def test_amax_in_the_last_element_of_a_ragged_block():
    x = wide((3, 200))
    x[:, -1] = 1e6
    q = quantize(jnp.asarray(x))
    assert_quantized(q, x, *ROWS, E4M3)
    assert np.all(np.asarray(q.values[:, -1]).astype(np.float32) == 448)


def test_quantize_both_equals_its_two_halves():
    x = wide((200, 130), jnp.bfloat16)
    rows, columns = quantize_both(jnp.asarray(x), dtype=E5M2, pow2_scale=True)
    assert_quantized(rows, x, *ROWS, E5M2, True)
    assert_quantized(columns, x, *COLUMNS, E5M2, True)


def test_with_transpose_and_transposed_only_are_the_exact_transpose():
    x = wide((200, 130))
    q = quantize(jnp.asarray(x), block=(128, 128), with_transpose=True)
    assert_quantized(q, x, *SQUARE, E4M3)
    reference.assert_same_bits(q.transposed, np.asarray(q.values).T)
    only = quantize_transposed(jnp.asarray(x), dtype=E4M3, pow2_scale=False, implementation=None)
    assert_quantized(only, x.T, *SQUARE, E4M3)
    stored = quantize(jnp.asarray(x), block=(128, 128), with_transpose="only")
    assert stored.values is None
    assert_quantized(stored.T, x.T, *SQUARE, E4M3)


@pytest.mark.parametrize("m", [128, 130])  # folds into m where 128 divides it, else one by one
@pytest.mark.parametrize(
    "block, axis, with_transpose",
    [(*ROWS, False), (*COLUMNS, False), (*SQUARE, False), (*SQUARE, True)],
)
def test_leading_dimensions_and_vmap(block, axis, with_transpose, m):
    x = wide((2, 3, m, 140))
    args = dict(block=block, axis=axis, with_transpose=with_transpose)
    q = quantize(jnp.asarray(x), **args)
    assert_quantized(q, x, block, axis, E4M3)
    moved = jnp.moveaxis(jnp.asarray(x), 0, 2)
    mapped = jax.vmap(functools.partial(quantize, **args), in_axes=2)(moved)
    jax.tree.map(reference.assert_same_bits, mapped, q)
    if with_transpose:
        reference.assert_same_bits(q.transposed, np.swapaxes(np.asarray(q.values), -1, -2))


@pytest.mark.parametrize("m", [128, 130])
def test_vmap_of_quantize_both(m):
    x = wide((3, m, 140))
    rows, columns = jax.vmap(quantize_both)(jnp.asarray(x))
    assert_quantized(rows, x, *ROWS, E4M3)
    assert_quantized(columns, x, *COLUMNS, E4M3)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 3, 4), (3, 0, 4), (3, 4, 0)])
@pytest.mark.parametrize("block, axis", [ROWS, COLUMNS, SQUARE])
def test_empty_arrays(shape, block, axis):
    x = np.zeros(shape, np.float32)
    assert_quantized(quantize(jnp.asarray(x), block=block, axis=axis), x, block, axis, E4M3)


def test_gathering_fp8_equals_quantising_after_the_gather():
    # What makes a sharded weight travel as FP8: shards cut at 128 keep every block whole.
    x = wide((512, 256))
    shards = [quantize(jnp.asarray(s), block=(128, 128)) for s in np.split(x, 4)]
    joined = jax.tree.map(lambda *s: jnp.concatenate(s), *shards)
    assert_quantized(joined, x, *SQUARE, E4M3)


@pytest.mark.parametrize(
    "args, error, message",
    [
        (dict(x=jnp.ones((2, 2), jnp.int32)), TypeError, r"x must be bf16, f16 or f32; got x s32"),
        (dict(x=[[1.0]]), TypeError, "x must be an array; got list"),
        (dict(x=jnp.ones(3)), ValueError, r"x must be \(..., m, k\); got x f32\[3\]"),
        (dict(block=(128, 1)), ValueError, r"block must be \(1, 128\) or .*; got \(128, 1\)"),
        (dict(axis=-3), ValueError, r"axis must be -1 or -2; got -3, x f32\[2,2\]"),
        (dict(axis=2), ValueError, r"axis must be -1 or -2; got 2, x f32\[2,2\]"),
        (dict(axis=True), ValueError, "axis must be -1 or -2; got True"),
        (dict(x=jax.random.split(jax.random.key(0), 4).reshape(2, 2)), TypeError, "x key<fry>"),
        (dict(x=np.ones((2, 2), ">f4")), TypeError, r"got x byte-swapped f32\[2,2\]"),
        (dict(axis=np.ones(2)), ValueError, r"axis must be -1 or -2; got f64\[2\]"),
        (dict(block=np.ones(2)), ValueError, r"block must be \(1, 128\) or .*; got f64\[2\]"),
        (dict(axis=0, block=(128, 128)), ValueError, r"with block \(1, 128\); got axis 0, block"),
        (dict(axis=-2, block=(128, 128)), ValueError, r"-2 with block \(1, 128\); got axis -2"),
        (dict(x=jnp.ones((2, 2, 2)), axis=0), ValueError, r"got axis 0.*x f32\[2,2,2\]"),
        (dict(dtype=jnp.bfloat16), TypeError, "dtype must be f8e4m3fn or f8e5m2; got bf16"),
        (dict(with_transpose=True), ValueError, r"with_transpose must go with .*quantize_both"),
        (dict(with_transpose="only"), ValueError, "with_transpose must go with .*quantize_both"),
        (dict(with_transpose="both"), TypeError, "with_transpose must be True, .* got 'both'"),
        (dict(with_transpose=1), TypeError, "with_transpose must be True, False or 'only'; got 1"),
        (
            dict(implementation="triton"),
            ValueError,
            "None, 'cuda', 'xla' or 'emulate'; got 'triton'",
        ),
    ],
)
def test_bad_input_is_told_at_trace_time(args, error, message):
    x = args.pop("x", jnp.ones((2, 2)))
    with raises(error, match="quantize: .*" + message):
        quantize(x, **args)


def test_axis_counts_from_the_front_too():
    x = wide((130, 140))
    assert_quantized(quantize(jnp.asarray(x), axis=0), x, *COLUMNS, E4M3)
    assert_quantized(quantize(jnp.asarray(x), axis=1), x, *ROWS, E4M3)


def test_differentiation_points_to_matmul():
    message = r"quantize: matmul, .* are differentiable once.*pass .* w itself .*stop_gradient\(w\)"
    x = jnp.ones((2, 2))
    with raises(NotImplementedError, match="(?i)" + message):
        jax.grad(lambda w: matmul(x, quantize(w, block=(128, 128))).sum())(x)


def test_warning_category_is_public():
    assert issubclass(FallbackWarning, Warning)


@pytest.mark.parametrize("function", [quantize, quantize_both])
@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(dtype="e5m2"), "dtype must be f8e4m3fn or f8e5m2; got 'e5m2'"),
        (dict(dtype=None), "dtype must be f8e4m3fn or f8e5m2; got None"),
        (dict(pow2_scale="no"), "pow2_scale must be True or False; got 'no'"),
        (dict(pow2_scale=None), "pow2_scale must be True or False; got None"),
    ],
)
def test_bad_options_raise(function, kwargs, message):
    with raises(TypeError, match=f"{function.__name__}: {message}"):
        function(jnp.ones((2, 2)), **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [dict(axis=-1), dict(block=(1, 128)), dict(pow2_scale=True), dict(with_transpose=True)],
)
def test_options_must_be_static(kwargs):
    (name,) = kwargs
    message = f"quantize: {name} must be static; got a traced .*. Name it in static_argnames"
    with raises(TypeError, match=message):
        jax.jit(quantize)(jnp.ones((2, 2)), **kwargs)
