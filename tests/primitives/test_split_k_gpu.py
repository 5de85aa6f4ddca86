"""Products whose k-blocks a cluster divides: the bits of all other products, and the same again."""

import dataclasses
import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import second_stream
from gpu_cases import E4M3, E5M2, SQUARE

from jax_fp8gemm._tuning import choose, split_k, tile_config

pytestmark = pytest.mark.gpu

OTHER = tile_config.TILE_64X16
each_config = pytest.mark.parametrize("config", split_k.SPLIT_K_CONFIGS, ids=str)
# Fewer k-blocks than CTAs, one chunk of them and a part of the next, more than there are stages;
# columns that end inside a tile and inside a block of scales; several rows of tiles; more tiles
# than clusters run at a time.
SHAPES = [
    (1, 8, 16),
    (5, 200, 384),
    (7, 1032, 272),
    (8, 128, 16384),
    (9, 576, 7168),
    (16, 72, 2176),
    (13, 528, 14288),
    (33, 4096, 1040),
    (100, 1000, 4112),
]


@functools.cache
def _case(shape, formats=(E4M3, E4M3)):
    """Operands, and the f32 result of a tile that does not divide k."""
    lhs, rhs = gpu_cases.operands(sum(shape), shape, SQUARE, formats)
    return lhs, rhs, gpu_cases.compile_with(OTHER, gpu_cases.multiply, lhs, rhs)(lhs, rhs)


def _check(config, shape, formats=(E4M3, E4M3)):
    lhs, rhs, expected = _case(shape, formats)
    for out_dtype in (jnp.float32, jnp.bfloat16):
        multiply = functools.partial(gpu_cases.multiply, out_dtype=out_dtype)
        out_type = jax.ShapeDtypeStruct(shape[:2], out_dtype)
        out = gpu_cases.run_poisoned(multiply, (lhs, rhs), out_type, config)
        gpu_cases.assert_same(out, expected.astype(out_dtype), f"{config} {out_dtype.__name__}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_is_what_the_model_predicts(shape):
    lhs, rhs, expected = _case(shape)
    gpu_cases.assert_model_predicts(expected, lhs, rhs)


@each_config
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_split_gives_the_same_bits(shape, config):
    _check(config, shape)


@each_config
@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_every_format_gives_the_same_bits(formats, config):
    _check(config, (11, 264, 2000), formats)


@each_config
@pytest.mark.parametrize("num_stages", [4, 5, 7])
def test_a_ring_of_any_depth_gives_the_same_bits(num_stages, config):
    _check(dataclasses.replace(config, num_stages=num_stages), (33, 4096, 1040))
    _check(dataclasses.replace(config, num_stages=num_stages), (8, 128, 16384))


@each_config
def test_the_largest_k_fits_and_more_is_refused(config):
    k = split_k.SPLIT_K_MOST_K
    _check(config, (config.block_m, 64, k))
    lhs, rhs = gpu_cases.operands(0, (1, 64, 4 * k), SQUARE)
    too_much = gpu_cases.compile_with(config, gpu_cases.multiply, lhs, rhs)
    with pytest.raises(Exception, match="gemm: k must be at most .* Take a config without"):
        jax.block_until_ready(too_much(lhs, rhs))


@each_config
def test_rows_do_not_depend_on_m(config):
    lhs, rhs, expected = _case((100, 1000, 4112))
    for m in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 99):
        few = gpu_cases.rows_of(lhs, m)
        out = gpu_cases.compile_with(config, gpu_cases.multiply, few, rhs)(few, rhs)
        gpu_cases.assert_same(out, expected[:m], f"{config}: m={m}")


@each_config
def test_subnormal_results_and_other_rows(config):
    """Results around 2^-126, beside rows of NaN."""
    shape = 16, 528, 4000
    lhs, rhs, _ = _case(shape)
    values, scale = gpu_cases.on_host(lhs)
    scale = scale * np.float32(2.0**-132)
    nan = np.arange(shape[0]) % 3 == 1
    scale[nan] = np.nan
    lhs = gpu_cases.scaled(values, scale, gpu_cases.ROWS)
    out = gpu_cases.compile_with(config, gpu_cases.multiply, lhs, rhs)(lhs, rhs)
    other = gpu_cases.compile_with(OTHER, gpu_cases.multiply, lhs, rhs)(lhs, rhs)
    kept = np.asarray(out)[~nan]
    assert 0.1 < np.mean(np.abs(kept) < 2.0**-126)
    assert np.isnan(np.asarray(out)[nan]).all()
    reference.assert_same_bits(kept, np.asarray(other)[~nan], str(config))


@each_config
@pytest.mark.parametrize("shape", [(8, 128, 16384), (33, 4096, 1040)], ids=str)
def test_runs_are_equal_beside_a_busy_stream(shape, config):
    """Rings, cluster barriers and stores to other CTAs under shaken timing."""
    lhs, rhs, expected = _case(shape)
    compiled = gpu_cases.compile_with(config, gpu_cases.multiply, lhs, rhs)
    with second_stream.busy() as load:
        outs = [gpu_cases.count_different(compiled(lhs, rhs), expected) for _ in range(200)]
    assert load.launches > 10
    assert sum(map(int, outs)) == 0


def test_the_choice_is_a_split_with_the_bits_of_other_tiles():
    shape = 8, 528, 14336
    assert choose.choose(*shape, is_1d1d=False, out_f32=False, accumulate=False).cluster_k > 1
    lhs, rhs, expected = _case(shape)
    out = gpu_cases.compile_with(None, gpu_cases.multiply, lhs, rhs)(lhs, rhs)
    gpu_cases.assert_same(out, expected)
