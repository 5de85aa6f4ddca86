"""Every bit of gather_quantize against NumPy, and what it refuses."""

import gather_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import on_cpu, raises, raises_without_kernel
from gather_cases import E4M3, E5M2, FP8
from jax.interpreters import partial_eval
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from reference import assert_same_bits

from jax_fp8gemm import ScaledArray
from jax_fp8gemm._primitives.gather_quantize import gather_quantize

SIZES, FIRST_ROW = (60, 0, 130), 10


@pytest.mark.parametrize(
    "dtype, is_weighted, fmt, pow2",
    [
        (jnp.bfloat16, True, E4M3, False),
        (jnp.float16, False, E5M2, False),
        (jnp.float32, True, E5M2, True),
        (E4M3, False, E4M3, False),
        (E5M2, True, E4M3, True),
    ],
    ids=str,
)
def test_bits(dtype, is_weighted, fmt, pow2):
    x, rows, weights = gather_cases.problem(dtype, 20, 140, 270)
    mode = "column" if dtype in FP8 else "row_column"
    weights = weights if is_weighted else None
    gather_cases.check(x, rows, weights, SIZES, FIRST_ROW, mode, fmt, pow2)
    square = "block_transposed" if dtype in FP8 else "row_block_transposed"
    gather_cases.check(x, rows, weights, SIZES, FIRST_ROW, square, fmt, pow2)


@pytest.mark.parametrize("s, k, m", [(0, 5, 0), (3, 5, 0), (3, 0, 4)])
def test_nothing_to_quantise(s, k, m):
    x = np.ones((s, k), np.float32)
    rows, weights = np.zeros(m, np.int32), np.ones(m, np.float32)
    gather_cases.check(x, rows, weights, SIZES, 0, "row_column", E4M3)


@pytest.mark.parametrize(
    "both, kept, mode",
    [
        ("row_column", 0, "row"),
        ("row_column", 1, "column"),
        ("row_block_transposed", 0, "row"),
        ("row_block_transposed", 1, "block_transposed"),
    ],
)
def test_an_unused_direction_is_not_computed(both, kept, mode):
    x, rows, weights = gather_cases.problem(jnp.float32, 4, 128, 8)

    def run(*operands):
        how = dict(mode=both, dtype=E4M3, pow2_scale=False, implementation="xla")
        return gather_quantize(*operands, **how)[kept]

    closed = jax.make_jaxpr(run)(x, rows, weights, np.int32([8]), np.int32([0]))
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))
    (equation,) = (e for e in jaxpr.eqns if e.primitive.name == "jax_fp8gemm_gather_quantize")
    assert equation.params["mode"] == mode


def operands(**changed):
    given = dict(
        x=jnp.ones((4, 128)),
        rows=jnp.zeros((8,), jnp.int32),
        weights=None,
        group_sizes=jnp.ones((2,), jnp.int32),
        first_row=jnp.zeros((1,), jnp.int32),
        mode="column",
        dtype=E4M3,
        pow2_scale=False,
        implementation=None,
    )
    return given | changed


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(x=jnp.ones((4,))), ValueError, r"x must be \(s, k\)"),
        (dict(x=jnp.ones((4, 8), jnp.int32)), TypeError, r"x must be .* got x s32\[4,8\]"),
        (dict(rows=jnp.zeros((8,))), TypeError, r"rows must be s32; got rows f32\[8\]"),
        (dict(x=jnp.ones((0, 128))), ValueError, r"must have a row if rows \(m,\) has one"),
        (dict(weights=jnp.ones((7,))), ValueError, r"weights must be f32\[8\], one .*f32\[7\]"),
        (
            dict(x=ScaledArray(jnp.ones((4, 128), E4M3), jnp.ones((4, 1))), mode="row"),
            ValueError,
            r"mode must be 'column' or 'block_transposed' for an FP8 x; got mode 'row', "
            r"x f8e4m3fn\[4,128\]",
        ),
        (
            dict(x=ScaledArray(jnp.ones((4, 200), E4M3), jnp.ones((4, 1)))),
            ValueError,
            r"x_scale must be f32\[4,2\] .*got f32\[4,1\]",
        ),
    ],
)
def test_bad_operands(changed, error, message):
    with raises(error, match=f"gather_quantize: .*{message}"):
        gather_quantize(**operands(**changed))


@on_cpu
def test_cuda_without_a_gpu():
    with raises_without_kernel("gather_quantize"):
        gather_quantize(**operands(implementation="cuda"))


def test_features_are_cut_and_tokens_gathered():
    x, rows, weights = gather_cases.problem(jnp.float32, 16, 512, 270)
    on_mesh = mesh(AxisType.Auto, AxisType.Auto, shape=(4, 2))
    x = jax.device_put(jnp.asarray(x), NamedSharding(on_mesh, P("y", "x")))
    run = lambda x: gather_cases.run(x, rows, weights, SIZES, 0, "row_column", E4M3)
    compiled = jax.jit(run).lower(x).compile()
    along_rows, columns = compiled(x)
    assert along_rows.values.sharding.spec == P(None, "x")
    assert columns.values.sharding.spec == P("x")
    assert collectives(compiled) == ["all-gather f32[16,128]"]
    expected = run(np.asarray(x))
    for a, b in zip(*map(jax.tree.leaves, ((along_rows, columns), expected)), strict=True):
        assert_same_bits(a, b)
