"""The grouped kernels against the ungrouped ones, to the bit."""

import contextlib
import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_cases
import second_stream
from assertions import assert_all_same_bits
from gpu_cases import E4M3, E5M2, assert_same, bits

import jax_fp8gemm as jf
from jax_fp8gemm._data import groups
from jax_fp8gemm._primitives.grouped_gemm import grouped_gemm
from jax_fp8gemm._tuning import tile_config

pytestmark = pytest.mark.gpu

# Sizes around the 64 rows of a wgmma and the 128 of a scale block; none; all in one; sum < m;
# sum = 0; negative and past the end.
SIZES = {
    "edges": [0, 1, 63, 64, 65, 127, 128, 129],
    "aligned": [128, 256, 128, 0, 384, 128, 0, 128],
    "one group": [0, 0, 0, 900, 0, 0, 0, 0],
    "none": [0] * 8,
    "negative": [100, -5, 300, -(2**31), 60, 7, 0, 1],
    "past the end": [500, 300, 2**31 - 1, 40, 0, 9, 1, 100],
}
sizes_cases = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
M = 1003  # no multiple of 4: the scales of rows are then copied, not loaded by TMA
dims = pytest.mark.parametrize("m,n,k", [(M, 384, 512), (1004, 2880, 2880), (1024, 264, 7168)])


def _normal(shape, seed):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _ranges(sizes, m):
    starts, ends = groups.row_ranges(jnp.asarray(sizes), jnp.zeros((1,), jnp.int32), m)
    return list(zip(np.asarray(starts), np.asarray(ends), strict=True))


def _poison(x: jf.ScaledArray, first: int) -> jf.ScaledArray:
    """Rows from `first` on hold NaN."""
    return jf.ScaledArray(x.values, x.scale.at[first:].set(jnp.nan), block=x.block)


@pytest.mark.parametrize("g", [33, 1024])
def test_more_groups_than_a_warp_has_lanes(g):
    """Small integers, which make every sum exact: the bits of float64."""
    rng = np.random.default_rng(0)
    sizes = rng.choice([0, 0, 1, 2, 3, 5, 8], g)
    sizes[[31, 32]] = 130, 7
    integers = lambda *shape: rng.integers(-3, 4, shape).astype(np.float32)
    m = int(sizes.sum()) + 9
    operands = (
        integers(m, 256),
        integers(g, 256, 136),
        jnp.asarray(sizes, jnp.int32),
        integers(m, 136),
    )
    found = jax.jit(
        functools.partial(
            ragged_cases.vjp,
            recipe=jf.Recipe(pow2_scale=True),
            implementation=gpu_cases.IMPLEMENTATION,
        )
    )(*operands)
    expected = [np.float32(x) for x in ragged_cases.truth(*operands, pow2=True)]
    assert_all_same_bits(found, expected)


@sizes_cases
@dims
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_groups_of_rows_have_the_bits_of_their_own_products(sizes, m, n, k, out_dtype):
    lhs = jf.quantize(_normal((m, k), 0))
    rhs = jf.quantize(_normal((8, n, k), 1), block=(128, 128))
    ranges = _ranges(sizes, m)
    lhs = _poison(lhs, int(ranges[-1][1]))
    group_sizes = jnp.asarray(sizes, jnp.int32)
    how = dict(out_dtype=out_dtype, implementation="cuda")
    out = jf.scaled_ragged_dot(lhs, rhs, group_sizes, **how)
    # Of all rows, of which each group's own are compared: their bits do not depend on the others.
    multiply = jax.jit(functools.partial(jf.scaled_matmul, **how))
    for i, (start, end) in enumerate(ranges):
        weights = jf.ScaledArray(rhs.values[i], rhs.scale[i], block=(128, 128))
        assert_same(out[start:end], multiply(lhs, weights)[start:end], f"group {i}")
    end = ranges[-1][1]
    assert not np.any(np.asarray(bits(out[end:])))
    of_groups = groups.Groups.of_sizes(group_sizes)
    left = grouped_gemm(lhs, rhs, *of_groups, out_dtype, "cuda", unused_rows="undefined")
    assert_same(left[:end], out[:end], "rows of groups")


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("config", tile_config.GROUPED_CONFIGS[1], ids=str)
def test_every_config_of_rows_gives_the_same_bits(config, out_dtype):
    """680 columns: the last tile is cut, whatever its width."""
    m, n, k = 1004, 680, 1536
    lhs = jf.quantize(_normal((m, k), 0))
    rhs = jf.quantize(_normal((8, n, k), 1), block=(128, 128))
    group_sizes = jnp.asarray(SIZES["edges"], jnp.int32)
    call = functools.partial(jf.scaled_ragged_dot, out_dtype=out_dtype, implementation="cuda")
    with_config = gpu_cases.compile_with(config, call, lhs, rhs, group_sizes)
    # Of each group, by the tiles of a product without groups.
    multiply = jax.jit(
        functools.partial(jf.scaled_matmul, out_dtype=out_dtype, implementation="cuda")
    )
    out = with_config(lhs, rhs, group_sizes)
    first = 0
    for i, size in enumerate(SIZES["edges"]):
        weights = jf.ScaledArray(rhs.values[i], rhs.scale[i], block=(128, 128))
        rows = slice(first, min(m, first + max(0, size)))
        first = rows.stop
        assert_same(out[rows], multiply(lhs, weights)[rows], f"group {i}")
    assert not np.any(np.asarray(bits(out[first:])))


@pytest.mark.parametrize("rest", [0, 1])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_tiles_of_every_height_give_the_same_bits(formats, out_dtype, rest):
    """Groups of 1 .. 130 rows in tiles of 128 x 256, of which short ones exchange their operands,
    against tiles that never do. rest: rows of no group; without one the rows are no multiple of 4,
    and their scales lie elsewhere against 16 bytes in each k-block. 384 columns: the last tile is
    half empty."""
    n, k, sizes = 384, 1168, np.arange(1, 131)
    lhs = jf.quantize(_normal((int(sizes.sum()) + rest, k), 0), dtype=formats[0])
    rhs = jf.quantize(_normal((len(sizes), n, k), 1), block=(128, 128), dtype=formats[1])
    group_sizes = jnp.asarray(sizes, jnp.int32)
    call = functools.partial(jf.scaled_ragged_dot, out_dtype=out_dtype, implementation="cuda")
    wide, narrow = (
        gpu_cases.compile_with(config, call, lhs, rhs, group_sizes)(lhs, rhs, group_sizes)
        for config in (
            tile_config.TILE_128X256,
            tile_config.TILE_64X128,
        )
    )
    assert_same(wide, narrow)


def _free_nan(shape, dtype):
    """Frees NaNs of a result's size: where memory is used again, what no kernel stores is NaN."""
    jax.block_until_ready(jnp.full(shape, jnp.nan, dtype)).delete()


@pytest.mark.parametrize("expected_rows", [None, 8])  # cleared by the kernel, and by a fill
@sizes_cases
def test_masked_groups_have_the_bits_of_their_own_products(sizes, expected_rows):
    g, max_m, n, k = 8, 163, 384, 512
    lhs = jf.quantize(_normal((g, max_m, k), 0))
    rhs = jf.quantize(_normal((g, n, k), 1), block=(128, 128))
    group_sizes = jnp.asarray(sizes, jnp.int32)
    how = dict(expected_rows=expected_rows, implementation="cuda")
    _free_nan((g, max_m, n), jnp.bfloat16)
    out = jf.scaled_ragged_dot(lhs, rhs, group_sizes, **how)
    for i, size in enumerate(sizes):
        size = min(max(size, 0), max_m)
        rows = jf.ScaledArray(lhs.values[i], lhs.scale[i])
        weights = jf.ScaledArray(rhs.values[i], rhs.scale[i], block=(128, 128))
        expected = jf.scaled_matmul(rows, weights, implementation="cuda")
        assert_same(out[i, :size], expected[:size], f"group {i}")
        assert not np.any(np.asarray(bits(out[i, size:])))
    left = jf.scaled_ragged_dot(lhs, rhs, group_sizes, unused_rows="undefined", **how)
    is_valid = np.arange(max_m) < np.asarray(sizes)[:, None]
    assert_same(np.asarray(left)[is_valid], np.asarray(out)[is_valid], "rows of groups")


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("g,max_m,n", [(3, 3000, 1032), (1024, 162, 64), (1, 200, 8), (40, 161, 8)])
def test_the_kernel_clears_every_unused_row(g, max_m, n, out_dtype):
    """Results of many pieces and of few, and ends of rows anywhere in a piece."""
    k = 256
    lhs = jf.quantize(_normal((g, max_m, k), 0))
    rhs = jf.quantize(_normal((g, n, k), 1), block=(128, 128))
    used = np.random.default_rng(0).integers(-1, max_m + 2, g)
    used[0] = 0
    for sizes in (used, np.zeros(g)):
        group_sizes = jnp.asarray(sizes, jnp.int32)
        how = dict(out_dtype=out_dtype, implementation="cuda")
        _free_nan((g, max_m, n), out_dtype)
        out = jf.scaled_ragged_dot(lhs, rhs, group_sizes, **how)
        left = jf.scaled_ragged_dot(lhs, rhs, group_sizes, unused_rows="undefined", **how)
        is_valid = np.arange(max_m) < sizes[:, None]
        assert_same(np.asarray(out)[is_valid], np.asarray(left)[is_valid], "rows of groups")
        assert not np.any(np.asarray(bits(out))[~is_valid])


@sizes_cases
@pytest.mark.parametrize("m,k", [(M, 384), (1024, 2880), (512, 136)])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_ragged_columns_have_the_bits_of_the_reference(sizes, m, k, dtype):
    x = _normal((m, k), 0).at[m - 1].set(jnp.nan)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    call = lambda implementation: jf.quantize_ragged(
        x, group_sizes, dtype=dtype, implementation=implementation
    )
    out, expected = call("cuda"), call("xla")
    assert_same(out.values, expected.values)
    assert_same(out.scale, expected.scale)


@sizes_cases
@pytest.mark.parametrize("config", [None, *tile_config.configs(2, is_1d1d=True)], ids=str)
@pytest.mark.parametrize("out", ["bf16", "f32", "accumulate"])
def test_weight_gradients_have_the_bits_of_their_own_products(sizes, config, out):
    m, n, tokens, g = 320, 264, M, 8
    group_sizes = jnp.asarray(sizes, jnp.int32)
    lhs = jf.quantize_ragged(_normal((tokens, m), 0), group_sizes)
    rhs = jf.quantize_ragged(_normal((tokens, n), 1), group_sizes)
    accum = _normal((g, m, n), 2).astype(jnp.float32) if out == "accumulate" else None
    how = dict(out_dtype=jnp.bfloat16 if out == "bf16" else jnp.float32, implementation="cuda")

    def call(lhs, rhs, group_sizes, accum):
        return jf.scaled_ragged_wgrad(lhs, rhs, group_sizes, accumulate_into=accum, **how)

    operands = (lhs, rhs, group_sizes, accum)
    actual = gpu_cases.compile_with(config, call, *operands)(*operands)
    multiply = jax.jit(functools.partial(jf.scaled_matmul, **how))
    column = 0
    for i, (start, end) in enumerate(_ranges(sizes, tokens)):
        width = -(-int(end - start) // 128) * 128
        # All tokens, those of other groups as zeros: a zero block sum changes no bit.
        tokens_in_order = jnp.arange(lhs.shape[1])
        is_own = (column <= tokens_in_order) & (tokens_in_order < column + width)
        own = lambda x: jf.ScaledArray(
            jnp.where(is_own[None], x.values, jnp.zeros_like(x.values)),  # noqa: B023
            x.scale,
        )
        expected = multiply(own(lhs), own(rhs))
        if accum is not None:
            expected = expected + accum[i]
        assert_same(actual[i], expected, f"group {i}")
        column += width


def test_sampled_elements_are_what_the_model_predicts():
    """Of one group each way, with m such that row scales are copied, and with a zero tail."""
    m, n, k, sizes = M, 264, 1160, SIZES["edges"]
    group_sizes = jnp.asarray(sizes, jnp.int32)
    how = dict(out_dtype=jnp.float32, implementation="cuda")
    lhs = jf.quantize(_normal((m, k), 0))
    rhs = jf.quantize(_normal((8, n, k), 1), block=(128, 128))
    start, end = _ranges(sizes, m)[-1]
    out = jf.scaled_ragged_dot(lhs, rhs, group_sizes, **how)
    rows = jf.ScaledArray(lhs.values[start:end], lhs.scale[start:end])
    weights = jf.ScaledArray(rhs.values[-1], rhs.scale[-1], block=(128, 128))
    gpu_cases.assert_model_predicts(out[start:end], rows, weights, num_samples=256)

    lhs, rhs = (jf.quantize_ragged(_normal((m, f), f), group_sizes) for f in (320, 264))
    out = jf.scaled_ragged_wgrad(lhs, rhs, group_sizes, implementation="cuda")
    before = sum(-(-size // 128) * 128 for size in sizes[:-1])
    span = slice(before, before + 256)
    own = lambda x: jf.ScaledArray(x.values[:, span], x.scale[:, before // 128 : before // 128 + 2])
    gpu_cases.assert_model_predicts(out[-1], own(lhs), own(rhs), num_samples=256)


@pytest.mark.parametrize("is_beside", [False, True], ids=("alone", "beside a busy stream"))
def test_ragged_dot_and_its_gradients_repeat_their_bits(is_beside):
    """A thousand calls, each on another layout of the groups than the call before."""
    m, n, k, g = 2048, 768, 1024, 32
    x, w = _normal((m, k), 0), _normal((g, k, n), 1)

    def loss(x, w, group_sizes):
        return jnp.sum(jf.ragged_dot(x, w, group_sizes, implementation="cuda") ** 2)

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    rng = np.random.default_rng(0)
    layouts = [
        jnp.asarray(np.bincount(rng.integers(0, g, m - 100 * i), minlength=g), jnp.int32)
        for i in range(3)
    ]
    first = [step(x, w, sizes) for sizes in layouts]
    with second_stream.busy() if is_beside else contextlib.nullcontext():
        different = [
            jax.tree.map(gpu_cases.count_different, step(x, w, sizes), expected)
            for _ in range(334)
            for sizes, expected in zip(layouts, first, strict=True)
        ]
    assert sum(map(int, jax.tree.leaves(different))) == 0
