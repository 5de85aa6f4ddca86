"""Products that are added up in parts: the bits of the model, and the same again."""

import dataclasses
import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import second_stream
from gpu_cases import E4M3, E5M2, SQUARE
from partial_sums_cases import predicted

import jax_fp8gemm as jf
from jax_fp8gemm._data.split_k import count_parts
from jax_fp8gemm._tuning import partial_sums, tile_config

pytestmark = pytest.mark.gpu

OTHER = tile_config.TILE_64X16
each_config = pytest.mark.parametrize("config", partial_sums.PARTIAL_SUMS_CONFIGS, ids=str)
# Parts that are empty or one k-block; more k-blocks than stages; columns that end inside a tile and
# inside a block of scales; several rows of tiles; more tiles than clusters run at a time.
SHAPES = [
    (1, 8, 16),
    (5, 200, 384),
    (7, 1032, 1040),
    (8, 128, 32768),
    (9, 576, 7168),
    (33, 72, 2176),
    (64, 528, 14288),
    (100, 4096, 1040),
]


@functools.cache
def _operands(shape, formats=(E4M3, E4M3)):
    return gpu_cases.operands(sum(shape), shape, SQUARE, formats)


def _sum_of_parts(lhs, rhs, num_parts):
    """The f32 products of parts by another kernel, added in order."""
    num_blocks = lhs.scale.shape[1]
    length, total = -(-num_blocks // num_parts), None
    for i in range(num_parts):
        blocks = np.s_[:, i * length : (i + 1) * length]
        values = np.s_[:, i * length * 128 : (i + 1) * length * 128]
        part_of = lambda x, v=values, b=blocks: jf.ScaledArray(
            x.values[v], x.scale[b], block=x.block
        )
        x, y = part_of(lhs), part_of(rhs)
        part = gpu_cases.multiply(x, y) if x.shape[1] else jnp.zeros_like(total)
        total = part if total is None else total + part
    return total


def _check(config, shape, formats=(E4M3, E4M3)):
    lhs, rhs = _operands(shape, formats)
    expected = _sum_of_parts(lhs, rhs, config.cluster_k)
    for out_dtype in (jnp.float32, jnp.bfloat16):
        multiply = functools.partial(gpu_cases.multiply, out_dtype=out_dtype)
        out_type = jax.ShapeDtypeStruct(shape[:2], out_dtype)
        out = gpu_cases.run_poisoned(multiply, (lhs, rhs), out_type, config)
        gpu_cases.assert_same(out, expected.astype(out_dtype), f"{config} {out_dtype.__name__}")


@each_config
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_is_the_sum_of_the_parts(shape, config):
    _check(config, shape)


@each_config
@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_formats(formats, config):
    _check(config, (11, 264, 2000), formats)


@each_config
@pytest.mark.parametrize("num_stages", [4, 5, 7])
def test_a_ring_of_any_depth(num_stages, config):
    _check(dataclasses.replace(config, num_stages=num_stages), (64, 528, 14288))


@pytest.mark.parametrize("shape", [(8, 576, 7168), (64, 1024, 5120), (42, 608, 11472)], ids=str)
def test_split_k_has_the_bits_of_the_model(shape):
    m, n, k = shape
    lhs, rhs = _operands(shape)
    how = dict(out_dtype=jnp.float32, implementation="cuda")
    out = np.asarray(jf.scaled_matmul(lhs, rhs, split_k=True, **how))
    rng = np.random.default_rng(0)
    rows, cols = rng.integers(0, m, 512), rng.integers(0, n, 512)
    parts = count_parts(m, n, -(-k // 128))
    assert parts > 1
    matrices = *gpu_cases.on_host(lhs), *gpu_cases.on_host(rhs)
    expected = predicted(*matrices, rows, cols, parts)
    assert (out[rows, cols].view(np.uint32) == expected.view(np.uint32)).all()
    assert (out != np.asarray(jf.scaled_matmul(lhs, rhs, **how))).any()


def test_rows_do_not_depend_on_m():
    lhs, rhs = _operands((64, 1000, 4112))
    multiply = lambda x: jf.scaled_matmul(
        x, rhs, out_dtype=jnp.float32, split_k=True, implementation="cuda"
    )
    expected = multiply(lhs)
    for m in (1, 2, 3, 7, 8, 9, 16, 17, 24, 31, 33, 48, 63):
        gpu_cases.assert_same(multiply(gpu_cases.rows_of(lhs, m)), expected[:m], f"m={m}")


@each_config
def test_more_k_than_fits_is_refused(config):
    lhs, rhs = gpu_cases.operands(0, (1, 8, 1 << 23), SQUARE)
    too_much = gpu_cases.compile_with(config, gpu_cases.multiply, lhs, rhs)
    with pytest.raises(Exception, match="gemm: k must be at most .* Take a config without"):
        jax.block_until_ready(too_much(lhs, rhs))


@each_config
def test_runs_are_equal_beside_a_busy_stream(config):
    """Rings, cluster barriers and loads from other CTAs under shaken timing."""
    lhs, rhs = _operands((64, 4096, 2064))
    compiled = gpu_cases.compile_with(config, gpu_cases.multiply, lhs, rhs)
    expected = _sum_of_parts(lhs, rhs, config.cluster_k)
    with second_stream.busy() as load:
        outs = [gpu_cases.count_different(compiled(lhs, rhs), expected) for _ in range(100)]
    assert load.launches > 10
    assert sum(map(int, outs)) == 0


def test_matmul_in_a_graph_of_several_products():
    """Decoding: the same bits in a jitted chain of divided products."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((16, 4096)), jnp.bfloat16)
    ws = [jnp.asarray(rng.standard_normal((4096, 896)), jnp.bfloat16) for _ in range(8)]
    recipe = jf.Recipe(split_k=True)
    one = lambda w: jf.matmul(x, w, recipe=recipe, implementation="cuda")
    together = jax.jit(lambda ws: [one(w) for w in ws])(ws)
    for out, w in zip(together, ws, strict=True):
        gpu_cases.assert_same(out, one(w))


def test_the_other_tile_gives_other_bits():
    """What _sum_of_parts is compared with would otherwise prove nothing."""
    lhs, rhs = _operands((9, 576, 7168))
    whole = gpu_cases.compile_with(OTHER, gpu_cases.multiply, lhs, rhs)(lhs, rhs)
    assert int(gpu_cases.count_different(whole, _sum_of_parts(lhs, rhs, 8))) > 100
