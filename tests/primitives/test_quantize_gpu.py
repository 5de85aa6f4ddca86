"""The quantise kernels and the fallback on a GPU against the NumPy reference, bit for bit."""

import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import shapes
from gpu_cases import E4M3, E5M2, SQUARE

import jax_fp8gemm as jf

pytestmark = pytest.mark.gpu

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
formats = pytest.mark.parametrize("fmt", (E4M3, E5M2), ids=str)
pow2 = pytest.mark.parametrize("pow2", (False, True), ids=("exact", "pow2"))


def _rows(x, how):
    return [jf.quantize(x, **how)]


def _columns(x, how):
    return [jf.quantize(x, axis=-2, **how)]


def _both(x, how):
    return list(jf.quantize_both(x, **how))


def _blocks(x, how):
    return [jf.quantize(x, block=SQUARE, **how)]


def _blocks_and_transpose(x, how):
    q = jf.quantize(x, block=SQUARE, with_transpose=True, **how)
    assert q.transposed is not None
    return [q, jf.ScaledArray(q.transposed, q.scale.mT, block=SQUARE)]


def _reference(x, mode, fmt, pow2):
    """What each result of a mode must be."""
    quantize = functools.partial(reference.quantize, x, fmt=fmt, pow2=pow2)
    if mode in (_blocks, _blocks_and_transpose):
        values, scale = quantize(SQUARE)
        return [(values, scale), (values.T, scale.T)][: 1 if mode is _blocks else 2]
    return [quantize(axis=axis) for axis in {_rows: (-1,), _columns: (-2,), _both: (-1, -2)}[mode]]


MODES = (_rows, _columns, _both, _blocks, _blocks_and_transpose)
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__.strip("_"))


def _how(fmt, pow2, implementation=None):
    implementation = implementation or gpu_cases.IMPLEMENTATION
    return dict(dtype=fmt, pow2_scale=pow2, implementation=implementation)


def _check(inputs, mode, fmt, pow2, implementation=None):
    """All inputs in one program, each against the reference."""
    run = jax.jit(lambda xs: [mode(x, _how(fmt, pow2, implementation)) for x in xs])
    results = run([jnp.asarray(x) for x in inputs])
    for x, result in zip(inputs, results, strict=True):
        for i, (q, expected) in enumerate(zip(result, _reference(x, mode, fmt, pow2), strict=True)):
            what = f"{mode.__name__} {x.shape} result {i}"
            reference.assert_same_bits(q.scale, expected[1], f"{what}: scale")
            reference.assert_same_bits(q.values, expected[0], f"{what}: values")


@functools.cache
def _normal(dtype, shape):
    """Normal data whose magnitude changes by 2^20 from block to block."""
    rng = np.random.default_rng(shape)
    exponents = rng.integers(-10, 11, (-(-shape[0] // 128), -(-shape[1] // 128)))
    spread = np.exp2(np.repeat(np.repeat(exponents, 128, 0), 128, 1)[: shape[0], : shape[1]])
    return (rng.standard_normal(shape, np.float32) * spread / 64).astype(dtype)


def _special_blocks(dtype):
    """Blocks of 128 elements, each with one difficulty."""
    info = jnp.finfo(dtype)
    rng = np.random.default_rng(8)
    ramp = np.linspace(-1, 1, 128)
    blocks = np.tile(ramp, (16, 1))
    blocks[0] = 0.0
    blocks[1] = -0.0
    blocks[2] = ramp * float(info.smallest_subnormal) * 100
    blocks[3] = ramp * float(info.tiny)
    blocks[4] = ramp * float(info.max)
    blocks[5, 127] = np.inf
    blocks[6, 0] = -np.inf
    blocks[7, 64] = np.nan
    blocks[8, 127] = -np.nan
    blocks[9] = np.where(np.arange(128) == 127, 3.0, 1e-3)  # amax in the last element
    blocks[10] = np.where(np.arange(128) == 0, -3.0, 1e-3)  # and negative, in the first
    blocks[11] = np.where(np.arange(128) == 77, np.nan, np.inf)
    blocks[12] = np.where(np.arange(128) == 5, 448, 2.0 ** rng.integers(-10, 9, 128))
    # Ties of both grids: 448 and 57344 are in reach of f16 and bf16, so scales are powers of two.
    ties = (1 + (2 * rng.integers(0, 8, 128) + 1) / 16) * 2.0 ** rng.integers(-9, 8, 128)
    blocks[13] = np.where(np.arange(128) == 9, 448, np.minimum(ties, 448))
    blocks[14] = np.where(np.arange(128) == 9, 57344, np.minimum(ties * 64, 57344))
    blocks[15] = np.where(np.arange(128) == 3, 1.0, 0.0)
    with np.errstate(over="ignore", under="ignore"):
        return blocks.astype(dtype)


def _special(dtype):
    """Each difficult block alone in its scale block: a row, a column or a square; and ragged."""
    rows = _special_blocks(dtype).reshape(4, 512)
    squares = np.zeros((512, 512), dtype)
    squares[37::128] = rows
    # The last elements of the edge blocks of the ragged one fall away.
    return [rows, np.ascontiguousarray(rows.T), squares, squares[:486, :509]]


@modes
@dtypes
@formats
@pow2
def test_bits_on_ragged_shapes_and_special_values(mode, dtype, fmt, pow2):
    normal = [_normal(dtype, shape) for shape in shapes.QUANTIZE]
    _check(normal + _special(dtype), mode, fmt, pow2)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("implementation", (gpu_cases.IMPLEMENTATION, "xla"))
def test_a_rounding_in_front_of_it_stays(dtype, implementation):
    """XLA would compute in f32 what a program rounds to 16 bits and back."""
    x = np.random.default_rng(10).standard_normal((64, 256), np.float32)
    run = jax.jit(lambda x: jf.quantize(x.astype(dtype), implementation=implementation))
    q = run(x)
    values, scale = reference.quantize(x.astype(dtype))
    reference.assert_same_bits(q.scale, scale)
    reference.assert_same_bits(q.values, values)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
@formats
@pow2
def test_every_16_bit_value(dtype, fmt, pow2):
    """As amax, with 127 random fractions of it beside: all roundings of scales and values."""
    codes = np.arange(0x8000, dtype=np.uint16).view(dtype)
    rng = np.random.default_rng(9)
    with np.errstate(invalid="ignore"):
        fractions = rng.uniform(-1, 1, (0x8000, 128)).astype(np.float32)
        x = (fractions * codes.astype(np.float32)[:, None]).astype(dtype)
    x[:, 100] = codes
    _check([x], _rows, fmt, pow2)


@formats
@pow2
def test_random_f32_bits(fmt, pow2):
    """Any f32 as amax, from denormals on; the others within 2^18 of it."""
    rng = np.random.default_rng(10)
    amax = rng.integers(0, 0x7F800000, 1 << 15, dtype=np.uint32).view(np.float32)
    fractions = rng.uniform(-1, 1, (len(amax), 128)) * 2.0 ** -rng.integers(0, 18, (len(amax), 128))
    x = (fractions.astype(np.float32) * amax[:, None]).astype(np.float32)
    x[:, 3] = amax
    _check([x], _rows, fmt, pow2)


@modes
@pytest.mark.parametrize("shape", [(4096, 7168), (8192, 2112), (4001, 2880)], ids=str)
def test_real_shapes_equal_the_reference_lowering(mode, shape):
    """On the device; the reference lowering is itself held to NumPy below."""
    x = jnp.asarray(_normal(jnp.bfloat16, shape))
    kernel = jax.jit(lambda x: mode(x, _how(E4M3, False)))(x)
    plain = jax.jit(lambda x: mode(x, _how(E4M3, False, "xla")))(x)
    for actual, expected in zip(jax.tree.leaves(kernel), jax.tree.leaves(plain), strict=True):
        gpu_cases.assert_same(actual, expected, f"{mode.__name__} {shape}")


@modes
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@formats
def test_reference_lowering_on_the_gpu(mode, dtype, fmt):
    """implementation="xla" under jit: no flush to zero, no rough division, no double rounding."""
    inputs = [_special(dtype)[0], _special(dtype)[2], _normal(dtype, (129, 257))]
    for pow2 in (False, True):
        _check(inputs, mode, fmt, pow2, "xla")


@pytest.mark.parametrize("implementation", [None, "cuda", "xla"])
@formats
def test_rounding_survives_a_dequantisation_in_the_same_program(implementation, fmt):
    """XLA on GPU folds f32 -> FP8 -> f32 away unless it is kept from seeing both."""
    x = _normal(jnp.float32, (200, 320))
    how = dict(dtype=fmt, implementation=implementation)
    out = np.asarray(jax.jit(lambda x: jf.quantize(x, **how).dequantize())(x))
    values, scale = reference.quantize(x, fmt=fmt)
    expected = values.astype(np.float32) * np.repeat(scale, 128, axis=1)[:, : x.shape[1]]
    reference.assert_same_bits(out, expected)
    assert np.mean(out == x) < 0.1


def test_kernel_is_used():
    for mode in MODES:
        text = jax.jit(lambda x, m=mode: m(x, _how(E4M3, False))).lower(jnp.ones((128, 128)))
        assert text.as_text().count("custom_call @jax_fp8gemm_quantize") == 1


@modes
def test_results_overwrite_what_was_in_their_buffers(mode):
    """FP8 results into donated buffers of 0xFF bytes; ragged, so that edge tiles store too."""
    x = jnp.asarray(_normal(jnp.bfloat16, (200, 328)))
    types = jax.eval_shape(lambda x: [q.values for q in mode(x, _how(E4M3, False))], x)
    ones = lambda t: jax.lax.bitcast_convert_type(jnp.full(t.shape, 0xFF, jnp.uint8), t.dtype)
    poison = [ones(t) for t in types]
    addresses = {p.unsafe_buffer_pointer() for p in poison}
    run = jax.jit(
        lambda poison, x: [q.values for q in mode(x, _how(E4M3, False))],
        donate_argnums=0,
        keep_unused=True,
    )
    results = run(poison, x)
    assert {r.unsafe_buffer_pointer() for r in results} == addresses
    for actual, (values, _) in zip(
        results, _reference(np.asarray(x), mode, E4M3, False), strict=True
    ):
        reference.assert_same_bits(actual, values)


@modes
def test_batches_are_independent(mode):
    """vmap and leading dimensions: the bits of single calls, with m of one block and ragged."""
    for m in (128, 72):
        x = jnp.stack([jnp.asarray(_normal(jnp.bfloat16, (m, 200 + i)))[:, :200] for i in range(3)])
        mapped = jax.jit(jax.vmap(lambda x: mode(x, _how(E4M3, False))))(x)
        leading = jax.jit(lambda x: mode(x, _how(E4M3, False)))(x)
        for i in range(3):
            for one, a, b in zip(mode(x[i], _how(E4M3, False)), mapped, leading, strict=True):
                for leaf, a_leaf, b_leaf in zip(*map(jax.tree.leaves, (one, a, b)), strict=True):
                    gpu_cases.assert_same(a_leaf[i], leaf)
                    gpu_cases.assert_same(b_leaf[i], leaf)


def test_squares_of_more_matrices_than_a_grid_has_rows():
    x = jax.random.normal(jax.random.key(0), (65535 + 3, 3, 16), jnp.bfloat16)
    quantize = functools.partial(jf.quantize, block=SQUARE, with_transpose=True)
    found = quantize(x, implementation="cuda")
    for part in (slice(0, 3), slice(-6, None)):  # of the first launch; around the cut
        expected = jax.tree.leaves(quantize(x[part], implementation="xla"))
        for actual, wanted in zip(jax.tree.leaves(found), expected, strict=True):
            gpu_cases.assert_same(actual[part], wanted)
