"""The contract of the bits: every config, every m, every run gives what the bit model predicts."""

import dataclasses
import functools
import os

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import second_stream
from gpu_cases import FAMILIES

import jax_fp8gemm as jf
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import tile_config

pytestmark = pytest.mark.gpu

# Ragged in every extent; several tiles of any size each way; 9 k-blocks wrap a ring of stages.
SHAPE = (392, 520, 1096)
OUT_DTYPES = (jnp.float32, jnp.bfloat16)
FULL_M, NARROW = 4096, (200, 1152)  # for batch invariance: m, (n, k)
families = pytest.mark.parametrize("family", FAMILIES)
each_config = pytest.mark.parametrize("family,config", gpu_cases.FAMILY_CONFIGS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # each has a folder in that of the run
    gpu_cases.precompile(base.parent if is_worker else base)


@functools.cache
def _case(family: str):
    """Operands, accumulator, and the f32 result of the config that the heuristic picks."""
    lhs, rhs = gpu_cases.operands(0, SHAPE, FAMILIES[family])
    accum = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE[:2], np.float32) * 30)
    return lhs, rhs, accum, gpu_cases.multiply(lhs, rhs)


@families
def test_result_is_what_the_model_predicts(family):
    lhs, rhs, accum, out = _case(family)
    gpu_cases.assert_model_predicts(out, lhs, rhs, num_samples=8192)
    summed = gpu_cases.multiply(lhs, rhs, accum=accum)
    gpu_cases.assert_model_predicts(summed, lhs, rhs, accum=accum, num_samples=4096)


@families
@pytest.mark.parametrize("shape", [(128, 2112, 7168), (1, 7168, 16384), (4096, 576, 2880)], ids=str)
def test_model_predicts_real_shapes(shape, family):
    lhs, rhs = gpu_cases.operands(1, shape, FAMILIES[family])
    gpu_cases.assert_model_predicts(gpu_cases.multiply(lhs, rhs), lhs, rhs, num_samples=1024)


@each_config
def test_every_config_gives_the_same_bits(family, config):
    """f32, bf16 and accumulating, each into a poisoned or given buffer."""
    lhs, rhs, accum, expected = _case(family)
    gpu_cases.assert_model_predicts(expected, lhs, rhs)
    for out_dtype in OUT_DTYPES:
        multiply = functools.partial(gpu_cases.multiply, out_dtype=out_dtype)
        out_type = jax.ShapeDtypeStruct(SHAPE[:2], out_dtype)
        out = gpu_cases.run_poisoned(multiply, (lhs, rhs), out_type, config)
        gpu_cases.assert_same(out, expected.astype(out_dtype), f"{config} {out_dtype.__name__}")
    add = lambda accum, lhs, rhs: gpu_cases.multiply(lhs, rhs, accum=accum)
    given = accum.copy()
    compiled = gpu_cases.compile_with(config, add, given, lhs, rhs, donate_argnums=0)
    gpu_cases.assert_same(compiled(given, lhs, rhs), accum + expected, f"{config} accumulating")


@pytest.mark.parametrize("cluster_n", [1, 4])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
@pytest.mark.parametrize("num_k_blocks", [1, 2, 3, 5])
def test_two_copying_lanes_share_a_ring_of_any_depth(num_stages, num_k_blocks, cluster_n):
    """Tiles of one consumer, several a CTA, that begin anywhere in the ring and at either lane."""
    how = dict(num_accums=2, num_stages=num_stages, cluster_n=cluster_n)
    config = dataclasses.replace(tile_config.TILE_64X32, **how)
    lhs, rhs = gpu_cases.operands(2, (1543, 776, 128 * num_k_blocks - 16), FAMILIES["1d2d"])
    expected = gpu_cases.multiply(lhs, rhs)  # by a tile of several consumers, which have one lane
    out_type = jax.ShapeDtypeStruct(expected.shape, expected.dtype)
    for _ in range(3):
        out = gpu_cases.run_poisoned(gpu_cases.multiply, (lhs, rhs), out_type, config)
        gpu_cases.assert_same(out, expected, f"{config}")


@pytest.mark.parametrize(
    "config",
    [c for c in tile_config.configs(is_1d1d=False, with_clusters=True) if c.cluster_n > 1],
    ids=str,
)
def test_clusters_load_the_rows_that_lhs_has(config):
    """lhs ends in the first, the second and the last part that a CTA loads, and between two."""
    part = config.block_m // config.cluster_n
    for rest in (1, part, part + 3, 2 * part, config.block_m - 5):
        lhs, rhs = gpu_cases.operands(6, (config.block_m + rest, 1000, 656), FAMILIES["1d2d"])
        alone = dataclasses.replace(config, cluster_n=1)
        expected = gpu_cases.compile_with(alone, gpu_cases.multiply, lhs, rhs)(lhs, rhs)
        gpu_cases.assert_model_predicts(expected, lhs, rhs, num_samples=1024)
        out_type = jax.ShapeDtypeStruct(expected.shape, expected.dtype)
        out = gpu_cases.run_poisoned(gpu_cases.multiply, (lhs, rhs), out_type, config)
        gpu_cases.assert_same(out, expected, f"{config} {rest} more rows")


@each_config
def test_every_config_keeps_subnormal_numbers(family, config):
    """Results and accumulators around 2^-126, stored by TMA or not."""
    lhs, rhs, accum, _ = _case(family)
    values, scale = gpu_cases.on_host(lhs)
    lhs = gpu_cases.scaled(values, scale * np.float32(2.0**-132), gpu_cases.ROWS)
    accum = jnp.asarray(np.asarray(accum) * np.float32(2.0**-132))
    add = lambda accum, lhs, rhs: gpu_cases.multiply(lhs, rhs, accum=accum)
    given = accum.copy()
    compiled = gpu_cases.compile_with(config, add, given, lhs, rhs, donate_argnums=0)
    out = compiled(given, lhs, rhs)
    assert 0.1 < np.mean(np.abs(np.asarray(out)) < 2.0**-126) < 1
    gpu_cases.assert_model_predicts(out, lhs, rhs, accum=accum, num_samples=4096)


@pytest.mark.parametrize("config", tile_config.configs(is_1d1d=True), ids=str)
def test_tiles_cut_for_the_last_round_give_the_same_bits(config):
    """Two rounds of tiles but for four, which are cut where a tile has several consumers; the last
    row of tiles is short, and so is the last column."""
    num_row_tiles = extension.num_sms() + 2
    m, n, k = num_row_tiles * config.block_m - 40, 2 * config.block_n - 8, 520
    lhs, rhs = gpu_cases.operands(8, (m, n, k), FAMILIES["1d1d"])
    one_consumer = tile_config.TILE_64X16
    expected = gpu_cases.compile_with(one_consumer, gpu_cases.multiply, lhs, rhs)(lhs, rhs)
    gpu_cases.assert_model_predicts(expected, lhs, rhs)
    for out_dtype in OUT_DTYPES:
        multiply = functools.partial(gpu_cases.multiply, out_dtype=out_dtype)
        out_type = jax.ShapeDtypeStruct((m, n), out_dtype)
        out = gpu_cases.run_poisoned(multiply, (lhs, rhs), out_type, config)
        gpu_cases.assert_same(out, expected.astype(out_dtype))
    accum = jnp.asarray(np.random.default_rng(8).standard_normal((m, n), np.float32) * 30)
    add = lambda accum, lhs, rhs: gpu_cases.multiply(lhs, rhs, accum=accum)
    given = accum.copy()
    compiled = gpu_cases.compile_with(config, add, given, lhs, rhs, donate_argnums=0)
    gpu_cases.assert_same(compiled(given, lhs, rhs), accum + expected)


# Rows do not depend on m


@functools.cache
def _rows_case(family: str):
    """lhs of FULL_M rows, then of 1 .. 130, scales transposed so that they enter without a copy."""
    lhs, rhs = gpu_cases.operands(2, (FULL_M, *NARROW), FAMILIES[family])
    values, scale = gpu_cases.on_host(lhs)
    counts = (FULL_M, *range(1, 131))
    parts = [(jnp.asarray(values[:m]), jnp.asarray(scale[:m].T.copy())) for m in counts]
    return counts, parts, rhs


def _products(parts, rhs, out_dtype):
    """One program for all: compiling 131 would take the whole budget."""
    return [
        gpu_cases.multiply(jf.ScaledArray(values, scale_t.T), rhs, out_dtype)
        for values, scale_t in parts
    ]


def _check_rows(family, config, out_dtype, keep=lambda m: True):
    counts, parts, rhs = _rows_case(family)
    kept = [i for i, m in enumerate(counts) if i == 0 or keep(m)]
    function = functools.partial(_products, out_dtype=out_dtype)
    args = [parts[i] for i in kept], rhs
    full, *outs = gpu_cases.compile_with(config, function, *args)(*args)
    expected = np.asarray(full[: counts[-1]])
    for i, out in zip(kept[1:], outs, strict=True):
        reference.assert_same_bits(out, expected[: counts[i]], f"{config}: m={counts[i]}")


# Around the sizes of tiles, warpgroups and store slabs.
_EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130)


@each_config
def test_rows_do_not_depend_on_m(family, config):
    """m = 1 .. 130 against 4096, with this config for every m."""
    for out_dtype in OUT_DTYPES:
        keep = (lambda m: True) if out_dtype == jnp.float32 else _EDGES.__contains__
        _check_rows(family, config, out_dtype, keep)


@families
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_rows_do_not_depend_on_m_as_configs_change(family, out_dtype):
    """Each m with the config that the heuristic picks for it."""
    _check_rows(family, None, out_dtype)


# Runs do not differ


def _assert_repeatable(function, args, count):
    first = function(*args)
    different = [gpu_cases.count_different(function(*args), first) for _ in range(count)]
    assert sum(map(int, different)) == 0
    return first


@families
@pytest.mark.parametrize("shape", [(4096, 2112, 2048), (64, 576, 7168)], ids=str)
def test_hundred_runs_are_equal_alone_and_beside_a_busy_stream(shape, family):
    lhs, rhs = gpu_cases.operands(3, shape, FAMILIES[family])
    multiply = jax.jit(gpu_cases.multiply)
    alone = _assert_repeatable(multiply, (lhs, rhs), 100)
    with second_stream.busy() as load:
        beside = _assert_repeatable(multiply, (lhs, rhs), 100)
    assert load.launches > 10
    gpu_cases.assert_same(beside, alone)


@each_config
def test_every_config_beside_a_busy_stream(family, config):
    """Rings and cluster barriers under shaken timing."""
    lhs, rhs, _, expected = _case(family)
    compiled = gpu_cases.compile_with(config, gpu_cases.multiply, lhs, rhs)
    with second_stream.busy():
        out = _assert_repeatable(compiled, (lhs, rhs), 20)
    gpu_cases.assert_same(out, expected, str(config))


def test_other_rows_do_not_matter():
    """A row's bits beside zeros, NaN or other data in every other row."""
    m, n, k = SHAPE
    lhs, rhs, _, expected = _case("1d2d")
    for kind in (0, np.nan, 1e30):
        values, scale = (x.copy() for x in gpu_cases.on_host(lhs))
        others = np.arange(m) % 3 != 0
        values[others], scale[others] = reference.quantize(
            np.full((others.sum(), k), kind, np.float32)
        )
        out = gpu_cases.multiply(gpu_cases.scaled(values, scale, gpu_cases.ROWS), rhs)
        reference.assert_same_bits(
            np.asarray(out)[~others], np.asarray(expected)[~others], f"beside {kind}"
        )


@pytest.mark.parametrize("num_batch", [3])
def test_vmap_gives_the_bits_of_single_products(num_batch):
    pairs = [gpu_cases.operands(10 + i, (65, 256, 384), FAMILIES["1d2d"]) for i in range(num_batch)]
    lhs, rhs = (jax.tree.map(lambda *xs: jnp.stack(xs), *side) for side in zip(*pairs, strict=True))
    together = jax.jit(jax.vmap(gpu_cases.multiply))(lhs, rhs)
    shared = jax.jit(jax.vmap(gpu_cases.multiply, in_axes=(0, None)))(lhs, pairs[0][1])
    for i, (one_lhs, one_rhs) in enumerate(pairs):
        gpu_cases.assert_same(together[i], gpu_cases.multiply(one_lhs, one_rhs))
        gpu_cases.assert_same(shared[i], gpu_cases.multiply(one_lhs, pairs[0][1]))
