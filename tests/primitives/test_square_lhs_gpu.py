"""2d1d kernels, and the quantisers of their lhs, to the bit.

A 2d1d product is a 1d2d one of exchanged operands, transposed on its way to memory. The bit model
predicts the latter.
"""

import functools

import gather_cases
import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import ROWS, SQUARE, assert_same
from test_grouped_gpu import SIZES, M, sizes_cases

import jax_fp8gemm as jf
from jax_fp8gemm._primitives.gemm import gemm
from jax_fp8gemm._primitives.grouped_wgrad import grouped_wgrad
from jax_fp8gemm._primitives.quantize import rows_and_columns
from jax_fp8gemm._primitives.quantize_ragged import rows_and_ragged_columns
from jax_fp8gemm._tuning import tile_config

pytestmark = pytest.mark.gpu

configs = pytest.mark.parametrize(
    "config", [None, *tile_config.configs(is_1d1d=False, transpose_out=True)], ids=str
)
outs = pytest.mark.parametrize("out", ["bf16", "f32", "accumulate"])
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def _normal(*shape, seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _multiply(lhs, rhs, accum, *, dtype):
    return gemm(lhs, rhs, dtype, "cuda", accum)


# Edges of tiles on both sides; rows of out that no TMA could store unpadded; many tiles.
@configs
@outs
@pytest.mark.parametrize("m, n, k", [(300, 200, 640), (72, 67, 272), (1028, 2112, 384)])
def test_every_config_gives_the_bits_of_the_exchanged_product(config, out, m, n, k):
    rhs, lhs = gpu_cases.operands(0, (n, m, k))
    assert (lhs.block, rhs.block) == (SQUARE, ROWS)
    accum = _normal(m, n, seed=2, dtype=jnp.float32) if out == "accumulate" else None
    dtype = jnp.bfloat16 if out == "bf16" else jnp.float32
    multiply = functools.partial(_multiply, dtype=dtype)
    found = gpu_cases.compile_with(config, multiply, lhs, rhs, accum)(lhs, rhs, accum)
    exchanged = gpu_cases.multiply(rhs, lhs)
    gpu_cases.assert_model_predicts(exchanged, rhs, lhs, num_samples=64)
    expected = exchanged.T.astype(dtype)
    assert_same(found, expected if accum is None else accum + expected)


@configs
@outs
@sizes_cases
def test_every_group_has_the_bits_of_its_product_alone(sizes, config, out):
    m, n, g = 320, 264, 8
    group_sizes = jnp.asarray(sizes, jnp.int32)
    first_row = jnp.zeros((1,), jnp.int32)
    args = dict(dtype=E4M3, pow2_scale=False, implementation="cuda")
    _, lhs = rows_and_ragged_columns(_normal(M, m), group_sizes, first_row, SQUARE, **args)
    rhs = jf.quantize_ragged(_normal(M, n, seed=1), group_sizes)
    accum = _normal(g, m, n, seed=2, dtype=jnp.float32) if out == "accumulate" else None
    dtype = jnp.bfloat16 if out == "bf16" else jnp.float32

    def contract(lhs, rhs, group_sizes, accum):
        return grouped_wgrad(lhs, rhs, group_sizes, dtype, "cuda", accum)

    operands = lhs, rhs, group_sizes, accum
    found = gpu_cases.compile_with(config, contract, *operands)(*operands)
    first, num_blocks = 0, lhs.scale.shape[1]
    for i, size in enumerate(sizes):
        size = min(max(size, 0), M)
        end = min(first + -(-size // 128), num_blocks)
        own = lambda x, span=slice(first, end): jf.ScaledArray(
            x.values[:, span.start * 128 : span.stop * 128], x.scale[:, span], None, x.block
        )
        expected = gemm(own(lhs), own(rhs), dtype, "cuda")
        assert_same(found[i], expected if accum is None else accum[i] + expected, f"group {i}")
        first = end


def _assert_both_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert (x.block, x.shape) == (y.block, y.shape)
        assert_same(x.values, y.values)
        assert_same(x.scale, y.scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(300, 200), (1003, 133), (2, 256, 392), (3, 72, 64)])
@pytest.mark.parametrize("fmt, pow2", [(E4M3, False), (E5M2, True)])
def test_rows_and_square_columns_have_the_bits_of_the_reference(shape, dtype, fmt, pow2):
    x = _normal(*shape, dtype=dtype).at[..., 3, 5].set(jnp.nan)
    args = dict(dtype=fmt, pow2_scale=pow2)
    run = lambda how: jax.jit(lambda x: rows_and_columns(x, SQUARE, implementation=how, **args))(x)
    _assert_both_same(run("cuda"), run("xla"))


@sizes_cases
@pytest.mark.parametrize("m, k", [(M, 384), (1024, 2880), (512, 136)])
@pytest.mark.parametrize("kept", [slice(0, 2), slice(1, 2)], ids=["both", "columns"])
def test_ragged_square_columns_have_the_bits_of_the_reference(sizes, m, k, kept):
    x = _normal(m, k).at[m - 1].set(jnp.nan)
    groups = jnp.asarray(sizes, jnp.int32), jnp.full((1,), 5, jnp.int32)
    args = dict(dtype=E4M3, pow2_scale=False)

    def run(how):
        both = lambda x: rows_and_ragged_columns(x, *groups, SQUARE, implementation=how, **args)
        return jax.jit(lambda x: both(x)[kept])(x)

    _assert_both_same(run("cuda"), run("xla"))


@pytest.mark.parametrize("dtype", gather_cases.DTYPES)
def test_gathered_square_columns_have_the_bits_of_numpy(dtype):
    x, rows, _ = gather_cases.problem(dtype, 300, 392, M)
    mode = "block_transposed" if dtype in gather_cases.FP8 else "row_block_transposed"
    sizes = SIZES["edges"]
    gather_cases.check(x, rows, None, sizes, 7, mode, E4M3, implementation="cuda")


@pytest.mark.parametrize("name", ["matmul", "ragged_dot", "moe_mlp"])
def test_gradients_of_the_kernels_are_near_those_of_the_reference(name):
    m, d, f, g = 640, 256, 384, 4
    x, dout = _normal(m, d), _normal(m, d, seed=3)
    w, w_in, w_out = _normal(d, d, seed=1), _normal(g, d, 2 * f, seed=1), _normal(g, f, d, seed=2)
    sizes = jnp.asarray([100, 0, 300, 200], jnp.int32)
    how = dict(recipe=jf.Recipe(wgrad_lhs_block=SQUARE))
    functions = {
        "matmul": (jf.matmul, (x, w)),
        "ragged_dot": (lambda *o, **kw: jf.ragged_dot(*o, sizes, **kw), (x, w_in[:, :, :d])),
        "moe_mlp": (lambda *o, **kw: jf.moe.moe_mlp(*o, sizes, **kw), (x, w_in, w_out)),
    }
    function, operands = functions[name]

    def gradients(implementation):
        run = functools.partial(function, implementation=implementation, **how)
        return jax.jit(lambda *o: jax.vjp(run, *o)[1](dout))(*operands)

    for found, expected in zip(gradients("cuda"), gradients("xla"), strict=True):
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        # Sums in another order may round to another bf16, or to another FP8 value of an activation.
        assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)
