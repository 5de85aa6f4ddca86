"""copy_rows against NumPy, and what it refuses."""

import functools

import copy_rows_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import on_cpu, raises, raises_without_kernel
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from reference import E4M3, E5M2, assert_same_bits

from jax_fp8gemm import EXPORT_CHECKS, ScaledArray
from jax_fp8gemm._primitives.copy_rows import copy_rows


@pytest.mark.parametrize("implementation", ["xla", "emulate"])
@pytest.mark.parametrize(
    "s, copies, m, k, fmt",
    [
        (20, 3, 70, 256, E4M3),
        (20, 3, 30, 200, E5M2),
        (7, 40, 100, 17, E4M3),
        (1, 1, 1, 128, E5M2),
    ],
    ids=str,
)
def test_bits(s, copies, m, k, fmt, implementation):
    *operands, is_named = copy_rows_cases.problem(s, copies, m, k, fmt)
    found = copy_rows_cases.run(*operands, m, implementation)
    copy_rows_cases.check(found, *operands, is_named)


def test_other_rows_copy_the_first_one_off_a_gpu():
    *operands, is_named = copy_rows_cases.problem(20, 3, 70, 256, E4M3, share=0.3)
    found = copy_rows_cases.run(*operands, 70, "xla")
    first = np.broadcast_to(operands[0][:1], (np.sum(~is_named), 256))
    assert_same_bits(np.asarray(found.values)[~is_named], first)


@pytest.mark.parametrize("s, copies, m, k", [(0, 2, 3, 128), (3, 0, 3, 128), (3, 2, 0, 128)])
def test_nothing_to_copy(s, copies, m, k):
    *operands, _ = copy_rows_cases.problem(s, copies, m, k, E4M3)
    found = copy_rows_cases.run(*operands, m, "xla")
    assert found.shape == (m, k) and found.scale.shape == (m, 1)


def operands(**changed):
    given = dict(
        x=ScaledArray(jnp.ones((4, 200), E4M3), jnp.ones((4, 2))),
        places=jnp.zeros((4, 2), jnp.int32),
        num_rows=8,
        implementation=None,
    )
    return given | changed


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(places=jnp.zeros((4,), jnp.int32)), ValueError, r"places must be \(s, c\)"),
        (dict(places=jnp.zeros((4, 2))), TypeError, r"places must be s32; got places f32\[4,2\]"),
        (
            dict(places=jnp.zeros((3, 2), jnp.int32)),
            ValueError,
            r"places must be \(s, c\) for x \(s, k\); got places s32\[3,2\], x f8e4m3fn\[4,200\]",
        ),
        (
            dict(x=ScaledArray(jnp.ones((4, 200), E4M3), jnp.ones((4, 1)))),
            ValueError,
            r"x_scale must be f32\[4,2\] .*got f32\[4,1\]",
        ),
        (
            dict(x=ScaledArray(jnp.ones((2, 4, 200), E4M3), jnp.ones((2, 4, 2)))),
            ValueError,
            r"x must be \(s, k\)",
        ),
    ],
)
def test_bad_operands(changed, error, message):
    with raises(error, match=f"copy_rows: .*{message}"):
        copy_rows(**operands(**changed))


@on_cpu
def test_cuda_without_a_gpu():
    with raises_without_kernel("copy_rows"):
        copy_rows(**operands(implementation="cuda"))


def test_vmap():
    problems = [copy_rows_cases.problem(5, 3, 12, 200, E4M3, seed=seed) for seed in range(3)]
    values, scale, places = (jnp.stack(arrays) for arrays in list(zip(*problems, strict=True))[:3])
    call = functools.partial(copy_rows, num_rows=12, implementation="xla")
    found = jax.vmap(lambda *x: call(ScaledArray(*x[:2]), x[2]), (0, 0, 0))(values, scale, places)
    for i, problem in enumerate(problems):
        copy_rows_cases.check(found[i], *problem)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_features_are_cut_and_rows_gathered(axis_type):
    *given, is_named = copy_rows_cases.problem(16, 3, 40, 512, E4M3)
    on_mesh = mesh(axis_type, axis_type, shape=(4, 2))
    specs = P("y", "x"), P("y", "x"), P("y")
    placed = [
        jax.device_put(x, NamedSharding(on_mesh, spec))
        for x, spec in zip(given, specs, strict=True)
    ]
    call = jax.jit(lambda v, s, p: copy_rows(ScaledArray(v, s), p, 40, implementation="xla"))
    compiled = call.lower(*placed).compile()
    found = compiled(*placed)
    copy_rows_cases.check(found, *given, is_named)
    assert found.values.sharding.spec == P(None, "x")
    gathered = ["f32[16,1]", "f8e4m3fn[16,128]", "s32[16,3]"]
    assert collectives(compiled) == [f"all-gather {array}" for array in gathered]


def test_shard_map_copies_what_each_device_has():
    *given, _ = copy_rows_cases.problem(16, 2, 8, 256, E4M3, share=0.0)
    places = np.arange(32, dtype=np.int32).reshape(16, 2) % 8
    on_mesh = mesh(AxisType.Auto)
    run = jax.shard_map(
        lambda v, s, p: copy_rows(ScaledArray(v, s), p, 8, implementation=None),
        mesh=on_mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    found = jax.jit(run)(given[0], given[1], places)
    assert_same_bits(found.values, np.repeat(given[0], 2, axis=0))
    assert_same_bits(found.scale, np.repeat(given[1], 2, axis=0))


def test_a_program_for_a_gpu_has_one_call_with_these_layouts():
    avals = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((64, 384), E4M3), ((64, 3), jnp.float32), ((64, 8), jnp.int32))
    ]
    call = jax.jit(lambda v, s, p: copy_rows(ScaledArray(v, s), p, 200, implementation=None))
    exported = jax.export.export(call, platforms=("cuda",), disabled_checks=EXPORT_CHECKS)(*avals)
    text = exported.mlir_module()
    assert text.count("@jax_fp8gemm_copy_rows") == 1 and "word_bytes = 16 : i32" in text
    # Scales arrive row-major and leave with rows minor.
    (line,) = (x for x in text.splitlines() if "@jax_fp8gemm_copy_rows" in x)
    row_major, column_major = "dense<[1, 0]>", "dense<[0, 1]>"
    assert line.count(row_major) == 4 and line.count(column_major) == 1
