"""Few rows of lhs quantised inside the product: the bits of the two kernels, and the same again."""

import dataclasses
import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import second_stream
from gpu_cases import E4M3, E5M2, SQUARE

import jax_fp8gemm as jf
from jax_fp8gemm._primitives.quantizing_gemm import quantizing_gemm
from jax_fp8gemm._tuning import few_rows, split_k

pytestmark = pytest.mark.gpu

CONFIGS = few_rows.QUANTIZING_CONFIGS
DIVIDING_K = [c for c in CONFIGS if c.cluster_k > 1]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
# One k-block, and fewer than warps; k that ends inside a block, inside 16 values and inside rhs;
# columns that end inside a tile and inside a block of scales; more k-blocks than stages, and more
# tiles than multiprocessors.
SHAPES = [
    (1, 8, 16),
    (2, 200, 384),
    (3, 1032, 1048),
    (4, 128, 32768),
    (5, 576, 7168),
    (7, 72, 2176),
    (8, 528, 14288),
    (8, 32768, 1040),
]


@functools.cache
def _operands(shape, formats=(E4M3, E4M3)):
    m, _, k = shape
    _, rhs = gpu_cases.operands(sum(shape), (1, *shape[1:]), SQUARE, formats)
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k)) * 10.0 ** rng.integers(-6, 6, (m, 1))
    return jnp.asarray(x, jnp.bfloat16), rhs


def _call(x, rhs, out_dtype=jnp.float32, dtype=E4M3):
    how = dict(dtype=dtype, pow2_scale=False, implementation="cuda")
    return quantizing_gemm(x, rhs, out_dtype, **how)


def _two_kernels(x, rhs, out_dtype=jnp.float32, dtype=E4M3):
    lhs = jf.quantize(x, dtype=dtype, implementation="cuda")
    return jf.scaled_matmul(lhs, rhs, out_dtype=out_dtype, implementation="cuda")


def _check(config, shape, formats=(E4M3, E4M3)):
    m, n, k = shape
    shape = (m, n, min(k, split_k.SPLIT_K_MOST_K)) if config.cluster_k > 1 else shape
    x, rhs = _operands(shape, formats)
    for out_dtype in (jnp.float32, jnp.bfloat16):
        how = dict(out_dtype=out_dtype, dtype=formats[0])
        run = functools.partial(_call, **how)
        out_type = jax.ShapeDtypeStruct(shape[:2], out_dtype)
        out = gpu_cases.run_poisoned(run, (x, rhs), out_type, config)
        gpu_cases.assert_same(out, _two_kernels(x, rhs, **how), f"{config} {out_dtype.__name__}")


@each_config
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_two_kernels(shape, config):
    _check(config, shape)


@each_config
@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_formats(formats, config):
    _check(config, (6, 264, 2000), formats)


# As few stages as there may be, and counts that do not divide the warps' k-blocks, as far as shared
# memory goes.
@each_config
@pytest.mark.parametrize("num_stages", [8, 9, 11])
def test_a_ring_of_any_depth(num_stages, config):
    num_stages = min(num_stages - 4 * (config.cluster_k > 1), config.num_stages)
    _check(dataclasses.replace(config, num_stages=num_stages), (8, 528, 14288))


@pytest.mark.parametrize("config", (*CONFIGS[:2], *DIVIDING_K), ids=str)
def test_blocks_that_are_not_finite(config):
    """NaN, Inf, zeros, the largest and the smallest values, each in a block of its own."""
    x, rhs = _operands((8, 4096, 1024))
    values = np.array(x)
    values[0, 3], values[1, 200], values[2, 300] = np.nan, np.inf, -np.inf
    values[3, :128], values[4] = 0, 0
    values[5, 130], values[6, 140] = float(jnp.finfo(jnp.bfloat16).max), 1e-40
    values[7, :128] = 1e-40
    x = jnp.asarray(values)
    out = gpu_cases.compile_with(config, _call, x, rhs)(x, rhs)
    expected = _two_kernels(x, rhs)
    assert np.isnan(np.asarray(expected)[:3]).all()
    assert not np.isnan(np.asarray(expected)[3:5]).any()
    gpu_cases.assert_same(out, expected)


@pytest.mark.parametrize("shape", [(8, 4096, 4112), (8, 576, 7168), (8, 2048, 4096)], ids=str)
def test_rows_do_not_depend_on_m(shape):
    x, rhs = _operands(shape)
    expected = _call(x, rhs)
    for m in range(1, shape[0]):
        gpu_cases.assert_same(_call(x[:m], rhs), expected[:m], f"m={m}")


@each_config
def test_runs_are_equal_beside_a_busy_stream(config):
    x, rhs = _operands((8, 8192, 2064))
    compiled = gpu_cases.compile_with(config, _call, x, rhs)
    expected = _two_kernels(x, rhs)
    with second_stream.busy() as load:
        outs = [gpu_cases.count_different(compiled(x, rhs), expected) for _ in range(100)]
    assert load.launches > 10
    assert sum(map(int, outs)) == 0


def test_matmul_in_a_graph_of_several_products():
    """Decoding: the same bits in a jitted chain, each of whose products is one kernel."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 4096)), jnp.bfloat16)
    weights = [jnp.asarray(rng.standard_normal((4096, 4096)) / 64, jnp.bfloat16) for _ in range(8)]
    weights = [jf.quantize_weight(w) for w in weights]
    one = functools.partial(jf.matmul, implementation="cuda")

    def chain(x, weights):
        for w in weights:
            x = one(x, w)
        return x

    compiled = jax.jit(chain).lower(x, weights).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="jax_fp8gemm_quantizing_gemm"') == 8
    assert "jax_fp8gemm_quantize" not in text.replace("jax_fp8gemm_quantizing", "")
    expected = x
    for w in weights:
        expected = jax.vjp(one, expected, w)[0]  # which keeps the quantised rows
    gpu_cases.assert_same(compiled(x, weights), expected)


def test_a_mesh_of_one_device():
    x, rhs = _operands((8, 4096, 1024))
    mesh = jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh):
        out = jax.jit(_call)(x, rhs)
    gpu_cases.assert_same(out, _two_kernels(x, rhs))
