"""sum_rows against NumPy, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sum_rows_cases
from errors import on_cpu, raises, raises_without_kernel
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from reference import assert_same_bits

from jax_fp8gemm import EXPORT_CHECKS
from jax_fp8gemm._primitives.sum_rows import sum_rows

BF16, F16, F32 = map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32))
# XLA's CPU backend may add a product without rounding it first: half an f32 ulp of each term.
FUSED = {BF16: 2.0**-8, F16: 2.0**-10, F32: 2.0**-21}


def check(found, operands):
    """Against NumPy's sums; a bf16 or f16 result may fall to the other side of a tie."""
    expected = sum_rows_cases.expected(*operands)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    rows, places, weights = operands
    is_row = (places >= 0) & (places < rows.shape[0])
    size = np.where(is_row, np.abs(weights), 0).sum(axis=1, keepdims=True) * 4
    error = np.abs(np.asarray(found, np.float32) - expected.astype(np.float32))
    assert np.all(error <= FUSED[rows.dtype] * size)


@pytest.mark.parametrize("implementation", ["xla", "emulate"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("m, k, s, c", [(40, 24, 30, 8), (5, 7, 3, 1), (9, 16, 20, 40)], ids=str)
def test_sums(m, k, s, c, dtype, implementation):
    operands = sum_rows_cases.problem(m, k, s, c, dtype)
    check(sum_rows_cases.run(*operands, implementation), operands)


def test_weights_of_one_give_sums_of_rows():
    """Whose bits no fusion of products changes."""
    rows, places, weights = sum_rows_cases.problem(40, 24, 30, 8, BF16)
    ones = np.ones_like(weights)
    expected = sum_rows_cases.expected(rows, places, ones)
    assert_same_bits(sum_rows_cases.run(rows, places, ones, "xla"), expected)


@pytest.mark.parametrize("m, k, s, c", [(0, 8, 3, 2), (3, 8, 0, 2), (3, 0, 3, 2), (3, 8, 3, 0)])
def test_nothing_to_add(m, k, s, c):
    rows, places, weights = jnp.ones((m, k)), jnp.zeros((s, c), jnp.int32), jnp.ones((s, c))
    assert_same_bits(sum_rows_cases.run(rows, places, weights, "xla"), np.zeros((s, k), F32))


def operands(**changed):
    given = dict(
        rows=jnp.ones((6, 8), BF16),
        places=jnp.zeros((4, 2), jnp.int32),
        weights=jnp.ones((4, 2)),
        implementation=None,
    )
    return given | changed


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(rows=jnp.ones((8,), BF16)), ValueError, r"rows must be \(m, k\)"),
        (dict(rows=jnp.ones((6, 8), jnp.int32)), TypeError, r"rows must be bf16, f16 or f32"),
        (dict(places=jnp.zeros((4,), jnp.int32)), ValueError, r"places must be \(s, c\)"),
        (dict(places=jnp.zeros((4, 2))), TypeError, r"places must be s32; got places f32\[4,2\]"),
        (dict(weights=jnp.ones((4, 2), BF16)), TypeError, r"weights must be f32"),
        (
            dict(weights=jnp.ones((4, 3))),
            ValueError,
            r"weights must have the shape of places; got weights f32\[4,3\], places s32\[4,2\]",
        ),
    ],
)
def test_bad_operands(changed, error, message):
    with raises(error, match=f"sum_rows: .*{message}"):
        sum_rows(**operands(**changed))


@on_cpu
def test_cuda_without_a_gpu():
    with raises_without_kernel("sum_rows"):
        sum_rows(**operands(implementation="cuda"))


def test_vmap():
    problems = [sum_rows_cases.problem(9, 16, 5, 3, F32, seed=seed) for seed in range(3)]
    stacked = [jnp.stack(arrays) for arrays in zip(*problems, strict=True)]
    call = functools.partial(sum_rows, implementation="xla")
    for found, problem in zip(jax.vmap(call)(*stacked), problems, strict=True):
        check(found, problem)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_tokens_and_features_are_cut_and_rows_gathered(axis_type):
    given = sum_rows_cases.problem(16, 32, 40, 3, F32)
    on_mesh = mesh(axis_type, axis_type, shape=(4, 2))
    specs = P("x", "y"), P("x"), P("x")
    placed = [
        jax.device_put(x, NamedSharding(on_mesh, spec))
        for x, spec in zip(given, specs, strict=True)
    ]
    call = jax.jit(lambda *operands: sum_rows(*operands, implementation="xla"))
    compiled = call.lower(*placed).compile()
    found = compiled(*placed)
    check(found, given)
    assert found.sharding.spec == P("x", "y")
    assert collectives(compiled) == ["all-gather f32[16,16]"]


def test_a_program_for_a_gpu_has_one_call():
    avals = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((64, 384), BF16), ((32, 8), jnp.int32), ((32, 8), F32))
    ]
    call = jax.jit(lambda *operands: sum_rows(*operands, implementation=None))
    exported = jax.export.export(call, platforms=("cuda",), disabled_checks=EXPORT_CHECKS)(*avals)
    text = exported.mlir_module()
    assert text.count("@jax_fp8gemm_sum_rows") == 1
    assert "input = 0 : i32, word_bytes = 16 : i32" in text
