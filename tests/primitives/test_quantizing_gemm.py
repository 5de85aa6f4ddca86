"""The product that quantises few rows of lhs: which products it takes, and what it stands for."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8gemm as jf
from jax_fp8gemm import DEEPSEEK_V3, HYBRID, Recipe, matmul
from jax_fp8gemm._primitives.quantizing_gemm import quantizing_gemm, quantizing_gemm_p
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import few_rows
from jax_fp8gemm._tuning.tile_config import configs

TARGET, APART = (
    "jax_fp8gemm_quantizing_gemm",
    ["jax_fp8gemm_quantize", "jax_fp8gemm_gemm"],
)
BF16 = jnp.bfloat16
# 4096 columns get tiles of 32.
M, N, K = 5, 4096, 264


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rows(m=M, k=K, seed=0):
    return jnp.asarray(normal(m, k, seed=seed), BF16)


def weight(n=N, k=K):
    return jf.quantize(jnp.asarray(normal(n, k, seed=1)), block=(128, 128))


def args(dtype=jnp.float8_e4m3fn, implementation=None):
    return dict(dtype=dtype, pow2_scale=False, implementation=implementation)


def targets(function, *operands):
    """The kernels that a program for a GPU calls."""
    lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @(jax_fp8gemm_\w+)", lowered.as_text())


def test_against_float64():
    """lhs quantised by NumPy. The product is off by bf16's rounding, 2^-9, and f32 sums."""
    x, w = rows(), weight()
    out = quantizing_gemm(x, w, BF16, **args())
    expected = reference.gemm(*reference.quantize(x), w.values, w.scale)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("implementation", ["xla", "emulate"])
@pytest.mark.parametrize("out_dtype", [BF16, jnp.float32])
def test_bits_are_those_of_two_ops(implementation, out_dtype):
    x, w = rows(), weight()
    how = dict(implementation=implementation)
    out = quantizing_gemm(x, w, out_dtype, **args(**how))
    quantised = jf.quantize(x, **how)
    expected = jf.scaled_matmul(quantised, w, out_dtype=out_dtype, **how)
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (out, expected)))


def test_matmul_of_few_rows_is_one_kernel():
    w = jf.quantize_weight(jnp.asarray(normal(K, N), BF16))
    assert targets(matmul, rows(), w) == [TARGET]
    assert targets(matmul, rows(8), w) == [TARGET]
    assert targets(lambda x, w: jf.dot_general(x, w, (((1,), (0,)), ((), ()))), rows(), w) == [
        TARGET
    ]
    unquantised = jnp.asarray(normal(K, N), BF16)
    assert targets(matmul, rows(), unquantised) == ["jax_fp8gemm_quantize", TARGET]
    # Leading dimensions are rows.
    assert targets(matmul, rows().reshape(M, 1, K), w) == [TARGET]


@pytest.mark.parametrize(
    "x, recipe",
    [
        (rows(9), DEEPSEEK_V3),
        (jnp.zeros((M, K - 4), BF16), DEEPSEEK_V3),  # its rows start at no multiple of 16 bytes
        (rows().astype(jnp.float32), DEEPSEEK_V3),
        (rows(), Recipe(pow2_scale=True)),
        (rows(), Recipe(split_k=True)),
    ],
    ids=["nine rows", "k", "f32", "pow2_scale", "split_k"],
)
def test_others_are_two_kernels(x, recipe):
    w = jf.quantize(jnp.asarray(normal(x.shape[1], N), BF16), block=(128, 128))
    assert [t for t in targets(partial(matmul, recipe=recipe), x, w)][-2:] == APART


def test_a_gradient_takes_two_kernels():
    """It keeps the quantised rows."""
    w = jf.quantize_weight(jnp.asarray(normal(K, N), BF16))
    run = lambda x, w: jax.vjp(matmul, x, w)[0]
    assert targets(run, rows(), w) == APART
    np.testing.assert_array_equal(
        np.asarray(matmul(rows(), w), np.float32), np.asarray(run(rows(), w), np.float32)
    )


def test_vmap_folds_the_rows():
    """So that few rows of each of many are one product of many."""
    w = weight()
    x = rows(20).reshape(20, 1, K)
    run = lambda x, implementation=None: quantizing_gemm(
        x, w, BF16, **args(implementation=implementation)
    )
    assert targets(jax.vmap(run), x) == APART
    emulated = partial(run, implementation="emulate")
    found, expected = jax.vmap(emulated)(x), jnp.stack([emulated(row) for row in x])
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (found, expected)))


def test_a_mesh_divides_two_ops():
    """Rows of rhs, and k, which adds partial sums; with Auto axes and with Explicit ones."""
    x, w = rows(8, 512), weight(N, 512)
    expected = np.asarray(quantizing_gemm(x, w, jnp.float32, **args()))
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("n", "k"), axis_types=(axis_type,) * 2)
        put = lambda y, *spec, mesh=mesh: jax.device_put(y, NamedSharding(mesh, P(*spec)))
        cut = jf.ScaledArray(put(w.values, "n", "k"), put(w.scale, "n", "k"), block=w.block)
        spec = P(None, "n") if axis_type == AxisType.Explicit else None
        with jax.set_mesh(mesh):
            run = jax.jit(lambda x, w, spec=spec: quantizing_gemm(
                x, w, jnp.float32, out_spec=spec, **args()))  # fmt: skip
            out = run(put(x, None, "k"), cut)
        np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-6, atol=1e-5)


def test_shards_of_a_shard_map_are_one_kernel():
    mesh = jax.make_mesh((4,), ("n",), axis_types=(AxisType.Auto,))
    w = weight(4 * N)
    run = jax.shard_map(
        lambda x, values, scale: quantizing_gemm(
            x, jf.ScaledArray(values, scale, block=w.block), BF16, **args()
        ),
        mesh=mesh,
        in_specs=(P(), P("n"), P("n")),
        out_specs=P(None, "n"),
    )
    assert targets(run, rows(), w.values, w.scale) == [TARGET]
    expected = quantizing_gemm(rows(), w, BF16, **args())
    found = run(rows(), w.values, w.scale)
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (found, expected)))


def test_a_device_with_other_tiles_runs_two_kernels(monkeypatch):
    """With 66 multiprocessors 2112 columns get tiles of 32, and with 132 tiles of 16."""
    w = weight(2112, 7168)
    for num_sms, expected in ((132, APART), (66, [TARGET])):
        monkeypatch.setattr(extension, "num_sms", lambda num_sms=num_sms: num_sms)
        run = lambda x: quantizing_gemm(x, w, BF16, **args())  # not lowered before
        assert targets(run, rows(k=7168)) == expected


def chosen(*shape):
    return few_rows.quantizing_config(*shape, out_f32=False)


def test_every_tile_of_one_consumer_can_quantise():
    alone = [c for c in few_rows.QUANTIZING_CONFIGS if c.cluster_k == 1]
    assert {c.block_n for c in alone} == {
        c.block_n for c in configs(is_1d1d=False) if c.num_consumers == 1 and c.num_stages >= 8
    }
    assert chosen(8, 28672, 4096) in alone
    assert chosen(9, 28672, 4096) is None


def test_tiles_of_16_columns_quantise_4_rows_or_little_k():
    assert chosen(8, 2048, 4096).block_n == chosen(4, 2112, 7168).block_n == 16
    assert chosen(8, 2112, 7168) is None


def test_clusters_that_divide_k_quantise_up_to_8_rows():
    for m in (1, 8):
        config = chosen(m, 576, 7168)
        assert config in few_rows.QUANTIZING_CONFIGS
        assert (config.block_m, config.cluster_k > 1) == (8, True)
    assert chosen(9, 576, 7168) is None
    # 20 k-blocks of a CTA are the most that were timed.
    assert chosen(8, 1024, 10240).cluster_k == 4 and chosen(8, 1024, 14336) is None


def test_what_is_refused():
    w, how = weight(), dict(out_dtype=jnp.dtype(BF16), reduce_dtype=jnp.dtype(jnp.float32),
                            out_spec=None, e5m2=False, implementation=None)  # fmt: skip
    bind = lambda x, w=w: quantizing_gemm_p(x, w.values, w.scale, **how)
    with raises(TypeError, "quantizing_gemm: lhs must be bf16; got lhs f32"):
        bind(rows().astype(jnp.float32))
    with raises(ValueError, "quantizing_gemm: lhs and rhs must"):
        bind(rows(k=128))


def test_the_hybrid_recipe_quantises_to_its_format():
    w = jf.quantize_weight(jnp.asarray(normal(K, N), BF16), recipe=HYBRID)
    assert targets(partial(matmul, recipe=HYBRID), rows(), w) == [TARGET]
