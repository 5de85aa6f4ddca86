"""The kernel of the gated product: the bits of a product and of the quantiser that reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_activations import NAMES, OTHERS
from gpu_cases import E4M3, E5M2, IMPLEMENTATION, assert_same
from test_grouped_gpu import SIZES

import jax_fp8gemm as jf
from jax_fp8gemm._primitives.grouped_gated_gemm import apart, grouped_gated_gemm_p

pytestmark = pytest.mark.gpu

FIRST_ROW = 3


def _operands(m, k, f, g, formats=(E4M3, E4M3), seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (g, 2 * f, k), jnp.bfloat16) * k**-0.5
    lhs = jf.quantize(x, dtype=formats[0])
    rhs = jf.quantize(w, block=(128, 128), dtype=formats[1])
    return lhs.values, lhs.scale, rhs.values, rhs.scale


def _groups(sizes, first_row=FIRST_ROW):
    return jnp.asarray(sizes, jnp.int32), jnp.full((1,), first_row, jnp.int32)


def _how(activation="silu", fmt=E4M3, pow2_scale=False):
    how = dict(e5m2=fmt == E5M2, pow2_scale=pow2_scale, implementation=IMPLEMENTATION)
    return dict(activation=activation, reduce_dtype=jnp.dtype(jnp.float32), **how)


def _of_groups(arrays, groups):
    """The rows of all groups."""
    sizes, first_row = groups
    m = arrays[0].shape[0]
    row = np.arange(m) - int(first_row[0])
    end = np.maximum(np.asarray(sizes, np.int64), 0).sum()
    return [x[(row >= 0) & (row < end)] for x in arrays]


def _check(operands, groups, **how):
    found = jax.jit(lambda *xs: grouped_gated_gemm_p(*xs, **_how(**how)))(*operands, *groups)
    expected = jax.jit(lambda *xs: apart(*xs, **_how(**how)))(*operands, *groups)
    for x, y in zip(*(_of_groups(xs, groups) for xs in (found, expected)), strict=True):
        assert_same(x, y)
    return found


@pytest.mark.parametrize("activation", ("silu", *OTHERS), ids=("silu", *NAMES))
@pytest.mark.parametrize("fmt, pow2_scale", [(E4M3, False), (E4M3, True), (E5M2, False)])
def test_every_activation(activation, fmt, pow2_scale):
    operands = _operands(1000, 512, 256, 8)
    _check(operands, _groups(SIZES["edges"]), activation=activation, fmt=fmt, pow2_scale=pow2_scale)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("m, k, f", [(1003, 512, 384), (1004, 1000, 128), (1024, 7168, 640)])
def test_groups_of_any_sizes(sizes, m, k, f):
    _check(_operands(m, k, f, 8), _groups(sizes))


@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
def test_formats_of_the_operands(formats):
    _check(_operands(700, 384, 256, 3, formats), _groups([300, 0, 390]))


def test_tiles_of_every_height():
    sizes = np.arange(1, 131)
    m = int(sizes.sum()) + FIRST_ROW
    _check(_operands(m, 256, 128, len(sizes)), _groups(sizes))


def test_many_tiles():
    """More than two for each multiprocessor, of groups that end inside a tile."""
    sizes = np.random.default_rng(0).multinomial(16384, [1 / 16] * 16)
    _check(_operands(16384, 2048, 1024, 16), _groups(sizes, 0))


def test_a_nan_shows_in_its_rows_alone():
    x, x_scale, *rhs = _operands(400, 512, 256, 2)
    x_scale = x_scale.at[FIRST_ROW + 10].set(jnp.nan)
    groups = _groups([200, 150])
    values, scale = _check((x, x_scale, *rhs), groups)
    values, scale = _of_groups((values, scale), groups)
    is_nan = np.isnan(np.asarray(scale))
    assert is_nan[10].all() and is_nan.sum() == 2
    assert np.isnan(np.asarray(values[10], np.float32)).all()


def test_rows_of_no_group_reach_nothing():
    x, x_scale, *rhs = operands = _operands(400, 512, 256, 2)
    groups = _groups([200, 150])
    row = jnp.arange(400)[:, None]
    is_used = (row >= FIRST_ROW) & (row < FIRST_ROW + 350)
    poisoned = x, jnp.where(is_used, x_scale, jnp.nan), *rhs
    found = (_of_groups(_check(xs, groups), groups) for xs in (operands, poisoned))
    for y, z in zip(*found, strict=True):
        assert_same(y, z)


def test_bits_repeat():
    """Over runs that reuse addresses, so that a recorded CUDA graph is replayed."""
    operands, layouts = _operands(1024, 1024, 512, 8), ("edges", "aligned", "negative")

    @jax.jit
    def run(sizes, *operands):
        values, scale = grouped_gated_gemm_p(*operands, sizes, _groups([])[1], **_how())
        row = jnp.arange(1024)[:, None]
        end = FIRST_ROW + jnp.maximum(sizes, 0).sum()
        is_used = (row >= FIRST_ROW) & (row < end)
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)
        return jnp.where(is_used, values, 0), jnp.where(is_used, scale, 0)

    sizes = [jnp.asarray(SIZES[name], jnp.int32) for name in layouts]
    first = [run(x, *operands) for x in sizes]
    for _ in range(100):
        for x, expected in zip(sizes, first, strict=True):
            jax.tree.map(assert_same, run(x, *operands), expected)
