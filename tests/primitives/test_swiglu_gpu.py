"""The fused SwiGLU quantisers on a GPU: nearest FP8 values to float64, and the same bits always."""

import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import swiglu_cases
from gpu_cases import E4M3, E5M2, assert_same
from test_grouped_gpu import SIZES

from jax_fp8gemm import ScaledArray
from jax_fp8gemm._primitives import swiglu_quantize

pytestmark = pytest.mark.gpu

M = 1003  # neither a multiple of 8 nor of 16
FIRST_ROW = 5  # rows of no group before the first, and mostly after the last
EDGES = SIZES["edges"]

# f: whole scale blocks; as in gpt-oss, where [dgate, dup] ends in half a block; f in a block that
# holds gates and ups; f a multiple of 8 but not of 16; f of which no row is aligned.
WIDTHS = (384, 2880, 200, 136, 77)
widths = pytest.mark.parametrize("f", WIDTHS)
sizes_cases = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
dtypes = pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
directions = pytest.mark.parametrize("is_grad", (False, True), ids=("h", "grad"))
formats = pytest.mark.parametrize("fmt", (E4M3, E5M2), ids=str)
pow2_scales = pytest.mark.parametrize("pow2", (False, True), ids=("exact", "pow2"))

# XLA takes 1 - sigma from a rounded sigma, which at a gate of 15 costs another 2e-6.
XLA_ERROR = 4e-6


@functools.cache
def _normal(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def _operands(is_grad, f, dtype, m=M):
    """gate_up with gates of up to about 12, and dh for the gradient."""
    gate_up = _normal((m, 2 * f), dtype, 0) * np.dtype(dtype).type(3)
    return [gate_up, _normal((m, f), dtype, 1)] if is_grad else [gate_up]


def _groups(sizes):
    return jnp.asarray(sizes, jnp.int32), jnp.full((1,), FIRST_ROW, jnp.int32)


def _quantize(
    operands, sizes, fmt=E4M3, pow2=False, with_columns=True, implementation=None, **kwargs
):
    """(rows, columns) of swiglu_quantize, or of swiglu_grad_quantize where there is a dh."""
    function = (
        swiglu_quantize.swiglu_grad_quantize
        if len(operands) > 1
        else swiglu_quantize.swiglu_quantize
    )
    return function(
        *map(jnp.asarray, operands),
        *_groups(sizes),
        with_columns=with_columns,
        dtype=fmt,
        pow2_scale=pow2,
        implementation=implementation or gpu_cases.IMPLEMENTATION,
        **kwargs,
    )


# Against float64


def _is_of_group(sizes, m=M):
    """Which rows are of a group. A row of none may hold anything."""
    end = reference.row_ranges(sizes, m, FIRST_ROW)[-1][1]
    return (np.arange(m) >= FIRST_ROW) & (np.arange(m) < end)


def _of_groups(rows, sizes):
    """The rows of all groups, on the host."""
    is_of_group = _is_of_group(sizes, rows.values.shape[0])
    return ScaledArray(*(np.asarray(x)[is_of_group] for x in (rows.values, rows.scale)))


def _zeros_of_no_group(sizes, *arrays):
    """The arrays (m, n), FP8 as bytes, with zeros in rows of no group; under jit."""
    row = jnp.arange(arrays[0].shape[0])[:, None]
    is_of_group = (row >= FIRST_ROW) & (row < FIRST_ROW + jnp.maximum(sizes, 0).sum())
    as_bytes = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8) if x.itemsize == 1 else x
    return [jnp.where(is_of_group, as_bytes(x), 0) for x in arrays]


def _assert_same_rows(actual, expected, sizes):
    actual, expected = _of_groups(actual, sizes), _of_groups(expected, sizes)
    reference.assert_same_bits(actual.values, expected.values)
    reference.assert_same_bits(actual.scale, expected.scale)


def _check(operands, sizes, fmt=E4M3, pow2=False):
    rows, columns = _quantize(operands, sizes, fmt, pow2)
    x, magnitude = swiglu_cases.truth(operands)
    is_of_group = _is_of_group(sizes, len(x))
    of_groups = x[is_of_group], magnitude[is_of_group]
    swiglu_cases.assert_nearest(_of_groups(rows, sizes), *of_groups, fmt, pow2, "rows")
    x_columns, is_token = swiglu_cases.in_columns(x, sizes, FIRST_ROW)
    swiglu_cases.assert_nearest(
        columns,
        x_columns,
        swiglu_cases.in_columns(magnitude, sizes, FIRST_ROW)[0],
        fmt,
        pow2,
        "columns",
    )
    tails = np.asarray(columns.values).view(np.uint8)[:, ~is_token]
    assert not tails.any(), "columns of no token"


@directions
@dtypes
@widths
def test_values_are_the_nearest_to_float64(is_grad, dtype, f):
    _check(_operands(is_grad, f, dtype), EDGES)


# So many that a CTA takes tiles of dgate and of dup in pairs, on an H100 or H200.
PAIRED_M, PAIRED_F = 4224, 1152
PAIRED_SIZES = (1000, 0, 1, 2051, 900)


@formats
def test_tiles_in_pairs_are_the_nearest_to_float64(fmt):
    _check(_operands(True, PAIRED_F, jnp.bfloat16, PAIRED_M), PAIRED_SIZES, fmt, fmt == E5M2)


@pytest.mark.parametrize(
    "is_grad, m, f, step",
    [
        # 384 rows at a time have too few tiles for pairs.
        (True, PAIRED_M, PAIRED_F, 384),
        # CTAs start in two turns, and for 1536 rows at a time in one.
        (False, 8320, 3328, 1536),
        (True, 8320, 3328, 1536),
        # In four.
        (False, 16512, 3200, 4096),
    ],
)
def test_many_tiles_have_the_bits_of_few(is_grad, m, f, step):
    operands = _operands(is_grad, f, jnp.bfloat16, m)
    ones = [m - FIRST_ROW]
    rows, columns = _quantize(operands, ones)
    alone, _ = _quantize(operands, ones, with_columns=False)
    _assert_same_rows(alone, rows, ones)
    for first in range(FIRST_ROW, m, step):
        last = min(first + step, m)
        # Rows of no group before the first one, as in all other cases.
        some = [np.concatenate([x[:FIRST_ROW], x[first:last]]) for x in operands]
        few_rows, few_columns = _quantize(some, [last - first])
        assert_same(few_rows.values[FIRST_ROW:], rows.values[first:last])
        assert_same(few_rows.scale[FIRST_ROW:], rows.scale[first:last])
        start, num_blocks = first - FIRST_ROW, -(-(last - first) // 128)
        place = slice(start, start + 128 * num_blocks)
        assert_same(few_columns.values[:, : 128 * num_blocks], columns.values[:, place])
        blocks = slice(start // 128, start // 128 + num_blocks)
        assert_same(few_columns.scale[:, :num_blocks], columns.scale[:, blocks])


@directions
@sizes_cases
@pytest.mark.parametrize("f,dtype", [(200, jnp.bfloat16), (77, jnp.float32)])
def test_groups_of_any_sizes(is_grad, sizes, f, dtype):
    _check(_operands(is_grad, f, dtype), sizes)


@directions
@dtypes
@formats
@pow2_scales
def test_every_format(is_grad, dtype, fmt, pow2):
    _check(_operands(is_grad, 136, dtype), EDGES, fmt, pow2)


@directions
@pytest.mark.parametrize("m,f", [(1, 1), (1, 8), (129, 3), (16, 64), (128, 128), (2500, 72)])
def test_small_and_whole_shapes(is_grad, m, f):
    _check(_operands(is_grad, f, jnp.bfloat16, m), EDGES)


@directions
@dtypes
@widths
def test_against_the_reference_lowering(is_grad, dtype, f):
    """Scales within the errors of both, values at most a step apart (two across a power of two),
    and hardly ever."""
    operands = _operands(is_grad, f, dtype)
    found = _quantize(operands, EDGES)
    run = jax.jit(lambda *xs: _quantize(xs, EDGES, implementation="xla"))
    expected = run(*map(jnp.asarray, operands))
    is_of_group = _is_of_group(EDGES)
    both = [
        (x[is_of_group], swiglu_cases.in_columns(x, EDGES, FIRST_ROW)[0])
        for x in swiglu_cases.truth(operands)
    ]
    found, expected = ((_of_groups(rows, EDGES), columns) for rows, columns in (found, expected))
    for q, e, x, magnitude in zip(found, expected, *both, strict=True):
        scale, expected_scale = np.asarray(q.scale), np.asarray(e.scale, np.float64)
        largest = swiglu_cases.block_max(magnitude)
        bound = XLA_ERROR * np.maximum(largest, float(reference.SMALLEST_AMAX)) / 448
        assert np.all(np.abs(scale - expected_scale) <= bound)
        values, expected_values = np.asarray(q.values), np.asarray(e.values)
        assert np.mean(values.view(np.uint8) != expected_values.view(np.uint8)) < 1e-3
        distance = np.abs(values.astype(np.float64) - expected_values.astype(np.float64))
        spread = swiglu_cases.per_element(scale, x.shape[1])
        step = 2 * swiglu_cases.half_step(x / spread, E4M3)
        assert np.all(distance <= 2 * step + XLA_ERROR * magnitude / spread)


# Bits


def _saturated(is_grad, f, dtype):
    """Operands with gates of at least 100, where sigma is 0 or 1, and f32 results to the bit."""
    gate, up = np.split(_normal((M, 2 * f), np.float32, 2), 2, axis=1)
    gate = np.copysign(100 + 10 * np.abs(gate), gate)
    gate_up = np.concatenate([gate, up], axis=1).astype(dtype)
    operands = [gate_up, _normal((M, f), dtype, 1)] if is_grad else [gate_up]
    gate, up = np.split(gate_up.astype(np.float32), 2, axis=1)
    sigma = (gate > 0).astype(np.float32)
    silu = gate * sigma
    if not is_grad:
        return operands, silu * up
    dh = operands[1].astype(np.float32)
    return operands, np.concatenate([dh * up * (sigma + silu * (1 - sigma)), dh * silu], axis=1)


@directions
@dtypes
@pytest.mark.parametrize("f", (200, 77))
@formats
@pow2_scales
def test_bits_where_sigma_is_exact(is_grad, dtype, f, fmt, pow2):
    operands, x = _saturated(is_grad, f, dtype)
    rows, columns = _quantize(operands, EDGES, fmt, pow2)
    values, scale = reference.quantize(x[_is_of_group(EDGES)], fmt=fmt, pow2=pow2)
    rows = _of_groups(rows, EDGES)
    reference.assert_same_bits(rows.scale, scale, "scale of rows")
    reference.assert_same_bits(rows.values, values, "rows")
    values, scale = reference.quantize_ragged(x, EDGES, fmt, pow2, FIRST_ROW)
    reference.assert_same_bits(columns.scale, scale, "scale of columns")
    reference.assert_same_bits(columns.values, values, "columns")


@directions
@dtypes
@widths
def test_modes_give_the_same_bits(is_grad, dtype, f):
    operands = _operands(is_grad, f, dtype)
    rows, columns = _quantize(operands, EDGES)
    alone, none = _quantize(operands, EDGES, with_columns=False)
    assert none is None
    _assert_same_rows(alone, rows, EDGES)
    primitive = (
        swiglu_quantize.swiglu_grad_quantize_p if is_grad else swiglu_quantize.swiglu_quantize_p
    )
    values, scale = primitive(
        *map(jnp.asarray, operands),
        *_groups(EDGES),
        mode="column",
        pieces=1,
        activation="silu",
        e5m2=False,
        pow2_scale=False,
        implementation=gpu_cases.IMPLEMENTATION,
    )
    assert_same(values, columns.values)
    assert_same(scale, columns.scale)


@directions
@sizes_cases
@pytest.mark.parametrize("f,m", [(384, M), (77, M), (PAIRED_F, PAIRED_M)])
def test_rows_of_no_group_reach_no_column(is_grad, sizes, f, m):
    operands = _operands(is_grad, f, jnp.bfloat16, m)
    rows, columns = _quantize(operands, sizes)
    poisoned = [x.copy() for x in operands]
    for x in poisoned:
        x[~_is_of_group(sizes, m)] = np.nan
    same_rows, same_columns = _quantize(poisoned, sizes)
    assert_same(same_columns.values, columns.values)
    assert_same(same_columns.scale, columns.scale)
    _assert_same_rows(same_rows, rows, sizes)


@directions
@dtypes
@pytest.mark.parametrize("f", (128, 77))
def test_special_values(is_grad, dtype, f):
    """NaN exactly where f32 arithmetic has it; large gates of either sign stay finite."""
    large = float(np.finfo(np.float32).max) / 16
    gates = [np.nan, np.inf, -np.inf, large, -large, 0.0, 0.0, 1.0, -88.0, -1e4]
    ups = [1.0, 1.0, 1.0, 0.5, 0.5, np.inf, np.nan, -np.inf, 1.0, 1.0]
    gate_up = np.ones((len(gates), 2 * f), np.float32)
    gate_up[:, 3], gate_up[:, f + 3] = gates, ups
    operands = [gate_up.astype(dtype)]
    if is_grad:
        operands.append(np.ones((len(gates), f), dtype))
        operands[0] = np.concatenate([operands[0], np.ones((2, 2 * f), dtype)])
        operands[1] = np.concatenate([operands[1], np.ones((2, f), dtype)])
        operands[1][-2:, 5] = np.nan, -np.inf
    # Rows of no group come first.
    operands = [np.concatenate([np.ones_like(x[:FIRST_ROW]), x]) for x in operands]
    with np.errstate(invalid="ignore"):
        x, magnitude = swiglu_cases.truth(operands)
    x, magnitude = x[FIRST_ROW:], magnitude[FIRST_ROW:]
    is_bad = np.add.reduceat(~np.isfinite(x), np.arange(0, x.shape[1], 128), axis=1) > 0
    expected = np.repeat(is_bad, 128, axis=1)[:, : x.shape[1]]
    rows, columns = _quantize(operands, [len(x)])
    rows = _of_groups(rows, [len(x)])
    np.testing.assert_array_equal(np.isnan(np.asarray(rows.scale)), is_bad)
    np.testing.assert_array_equal(np.isnan(np.asarray(rows.values, np.float32)), expected)
    is_finite = ~is_bad.any(axis=1)
    assert is_finite.sum() >= 4
    finite_rows = ScaledArray(rows.values[is_finite], rows.scale[is_finite])
    swiglu_cases.assert_nearest(
        finite_rows, x[is_finite], magnitude[is_finite], E4M3, False, "finite rows"
    )
    spoilt = ~np.isfinite(x).all(axis=0)  # a bad row spoils its columns
    np.testing.assert_array_equal(np.isnan(np.asarray(columns.scale))[:, 0], spoilt)


@directions
def test_results_overwrite_what_was_in_their_buffers(is_grad):
    """FP8 results into donated buffers of 0xFF bytes."""
    operands = list(map(jnp.asarray, _operands(is_grad, 200, jnp.bfloat16)))
    end = reference.row_ranges(EDGES, M, FIRST_ROW)[-1][1]

    def values(*xs):
        rows, columns = _quantize(xs, EDGES)
        return rows.values, columns.values

    types = jax.eval_shape(values, *operands)
    ones = lambda t: jax.lax.bitcast_convert_type(jnp.full(t.shape, 0xFF, jnp.uint8), t.dtype)
    poison = [ones(t) for t in types]
    addresses = {p.unsafe_buffer_pointer() for p in poison}
    run = jax.jit(lambda poison, *xs: values(*xs), donate_argnums=0, keep_unused=True)
    results = run(poison, *operands)
    assert {r.unsafe_buffer_pointer() for r in results} == addresses
    rows, columns = values(*operands)
    assert_same(results[0][FIRST_ROW:end], rows[FIRST_ROW:end])
    assert_same(results[1], columns)


@directions
def test_bits_repeat(is_grad):
    """Over runs that reuse addresses, so that a recorded CUDA graph is replayed."""
    operands = list(map(jnp.asarray, _operands(is_grad, 2880, jnp.bfloat16, 2048)))

    @jax.jit
    def run(sizes, *xs):
        rows, columns = _quantize(xs, sizes)
        return _zeros_of_no_group(sizes, rows.values, rows.scale), columns

    layouts = [jnp.asarray(SIZES[name], jnp.int32) for name in ("edges", "aligned", "negative")]
    first = [run(sizes, *operands) for sizes in layouts]
    for _ in range(100):
        for sizes, expected in zip(layouts, first, strict=True):
            jax.tree.map(assert_same, run(sizes, *operands), expected)


def test_each_is_one_custom_call():
    for is_grad, target in ((False, "swiglu_quantize"), (True, "swiglu_grad_quantize")):
        operands = _operands(is_grad, 136, jnp.bfloat16)
        text = jax.jit(lambda *xs: _quantize(xs, EDGES)).lower(*operands).as_text()
        assert text.count("custom_call @jax_fp8gemm_") == 1
        assert text.count(f"custom_call @jax_fp8gemm_{target}(") == 1
