"""Products on a mesh of all GPUs: bits, what is moved, loading beside collectives, CUDA graphs.

Small integers times a power of two for each scale block make every sum exact, in any order.
"""

import functools
import math
import os
import re

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import all_gpus, collectives

import jax_fp8gemm as jf

pytestmark = pytest.mark.gpu

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
M, N, K = 1024, 2048, 1024  # scale blocks for eight GPUs
both_axis_types = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
exact_matmul = functools.partial(
    jf.matmul, recipe=jf.Recipe(pow2_scale=True), implementation=gpu_cases.IMPLEMENTATION
)
quantize = functools.partial(jf.quantize, pow2_scale=True, implementation=gpu_cases.IMPLEMENTATION)


@functools.cache
def exact(*shape, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(-7, 8, size=shape)
    blocks = rng.integers(0, 4, size=(*shape[:-2], shape[-2] // 128, shape[-1] // 128))
    exponents = blocks.repeat(128, axis=-2).repeat(128, axis=-1)
    return (x * 2.0**exponents).astype(np.float32)


def place(mesh, operands, specs):
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]


def vjp(product, lhs, rhs, dout):
    """out, dlhs, drhs"""
    out, pullback = jax.vjp(product, lhs, rhs)
    return out, *pullback(dout)


@functools.cache
def on_one_gpu(*batch):
    """Operands, and results that are exact."""
    operands = exact(*batch, M, K), exact(*batch, K, N, seed=1), exact(*batch, M, N, seed=2)
    results = jax.device_get(jax.jit(functools.partial(vjp, exact_matmul))(*operands))
    lhs, rhs, dout = operands
    products = lhs @ rhs, dout @ rhs.mT, lhs.mT @ dout
    for found, product in zip(results, products, strict=True):
        np.testing.assert_array_equal(found, product)
    return operands, results


def print_copies(compiled, what):
    """What XLA adds to change a layout; pytest -rP shows it."""
    kernels = re.findall(r"%(\S+) = (\S+) (copy|transpose|fusion)\(", compiled.as_text())
    print(f"{what}: moves {collectives(compiled)}")
    for name, array, op in kernels:
        if op != "fusion" or re.search("copy|transpose", name):
            print(f"{what}: {op} {name} {array}")


def assert_on_kernels(compiled):
    """All three products."""
    assert compiled.as_text().count('custom_call_target="jax_fp8gemm_gemm"') >= 3


# lhs, rhs and out; the collectives of the three products.
CUTS = {
    "m": (P("x"), P(), P("x"), {"all-reduce"}),
    "n": (P(), P(None, "x"), P(None, "x"), {"all-reduce"}),
    "k": (P(None, "x"), P("x"), P(), {"all-reduce"}),
    "k, result scattered over n": (P(None, "x"), P("x"), P(None, "x"), None),
    "fully sharded rows": (P("x"), P("x"), P("x"), {"all-gather", "reduce-scatter"}),
    "fully sharded columns": (P("x"), P(None, "x"), P("x"), {"all-gather", "reduce-scatter"}),
    "tokens and columns": (P("x"), P(None, "y"), P("x", "y"), {"all-reduce"}),
    "tokens and rows": (P("x", "y"), P("y"), P("x"), {"all-reduce"}),
    "rows gathered for columns": (P("x"), P(None, "x"), P(None, "x"), None),
    "batch": (P("x"), P("x"), P("x"), set()),
}


@pytest.mark.parametrize("name", CUTS)
@both_axis_types
def test_the_bits_of_one_gpu(axis_type, name):
    lhs_spec, rhs_spec, out_spec, kinds = CUTS[name]
    on = all_gpus(*[axis_type] * (2 if "y" in (*lhs_spec, *rhs_spec) else 1))
    operands, expected = on_one_gpu(*[8] if name == "batch" else [])
    shardings = [NamedSharding(on, spec) for spec in (out_spec, lhs_spec, rhs_spec)]
    is_auto = axis_type == AUTO
    product = functools.partial(exact_matmul, out_sharding=None if is_auto else shardings[0])
    jitted = jax.jit(
        functools.partial(vjp, product), out_shardings=tuple(shardings) if is_auto else None
    )
    cut = place(on, operands, (lhs_spec, rhs_spec, out_spec))
    compiled = jitted.lower(*cut).compile()
    print_copies(compiled, f"{name}, {axis_type.name}")
    if kinds is not None:
        assert {text.split()[0] for text in collectives(compiled)} == kinds
    assert_on_kernels(compiled)
    for x, y, sharding in zip(compiled(*cut), expected, shardings, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
        reference.assert_same_bits(x, y)


def test_gradients_of_weights_are_added_in_bf16_where_the_recipe_says_so():
    on = all_gpus(AUTO)
    operands, (_, _, expected) = on_one_gpu()
    recipe = jf.Recipe(pow2_scale=True, reduce_dtype="bf16")
    run = functools.partial(vjp, functools.partial(exact_matmul, recipe=recipe))
    rows = NamedSharding(on, P("x"))
    cut = place(on, operands, [P("x")] * 3)
    compiled = jax.jit(run, out_shardings=rows).lower(*cut).compile()
    sums = [text for text in collectives(compiled) if text.startswith("reduce-scatter")]
    assert sums == [f"reduce-scatter bf16[{K // on.size},{N}]"]
    *_, found = compiled(*cut)
    assert not np.array_equal(found, expected)
    # Each of up to eight partial sums, and each sum of two of them, is rounded to 8 bits.
    np.testing.assert_allclose(found, expected, atol=2**-5 * np.abs(expected).max())


@pytest.mark.parametrize("rhs_spec", [P("x"), P(None, "x")], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_are_gathered_after_they_are_quantised(dtype, rhs_spec):
    on = all_gpus(AUTO)
    num = on.size
    x, w = place(on, (exact(M, K), exact(K, N, seed=1)), (P("x"), rhs_spec))

    def step(x, w):
        loss = lambda x, w: (exact_matmul(x, w).astype(jnp.float32) ** 2).sum()
        dx, dw = jax.grad(loss, (0, 1))(x, w)
        return dx, w - dw

    compiled = jax.jit(step).lower(x.astype(dtype), w.astype(dtype)).compile()
    print_copies(compiled, f"gathered weights, {rhs_spec}")
    # In whatever shape XLA gathers them.
    gathers = [text.split()[1] for text in collectives(compiled) if "all-gather" in text]
    sizes = sorted((dtype, math.prod(map(int, shape.split(",")))) for dtype, shape in
                   (text.removesuffix("]").split("[") for text in gathers))  # fmt: skip
    blocks = K // 128 * (N // 128)
    assert sizes == [("f32", blocks), ("f8e4m3fn", K * N)]  # once for both passes
    shard = (K // num, N) if rhs_spec == P("x") else (K, N // num)
    assert f"reduce-scatter f32[{shard[0]},{shard[1]}]" in collectives(compiled)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_accumulates_in_place_where_k_is_cut(spec):
    on = all_gpus(AUTO)
    lhs = quantize(exact(M, K))
    rhs = quantize(exact(K, N, seed=1).T, block=(128, 128))
    multiply = functools.partial(
        jf.scaled_matmul, out_dtype=jnp.float32, implementation=gpu_cases.IMPLEMENTATION
    )
    cut_k = NamedSharding(on, P(None, "x"))
    operands = jax.device_put((lhs, rhs), cut_k)
    (accum,) = place(on, [exact(M, N, seed=2)], [spec])
    add = jax.jit(
        lambda accum, lhs, rhs: multiply(lhs, rhs, accumulate_into=accum),
        donate_argnums=0,
        out_shardings=accum.sharding,
    )
    places = [shard.data.unsafe_buffer_pointer() for shard in accum.addressable_shards]
    out = add(accum, *operands)
    assert accum.is_deleted()
    assert [shard.data.unsafe_buffer_pointer() for shard in out.addressable_shards] == places
    expected = exact(M, K) @ exact(K, N, seed=1) + exact(M, N, seed=2)
    np.testing.assert_array_equal(np.asarray(out), expected)


def test_runs_and_replicas_agree():
    """Random data, k cut: sums over the mesh have one order."""
    on = all_gpus(AUTO)
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    operands = place(on, (normal(0, M, K), normal(1, K, N)), (P(None, "x"), P("x")))
    (dout,) = place(on, [normal(2, M, N)], [P()])
    run = jax.jit(
        functools.partial(vjp, functools.partial(jf.matmul, implementation="cuda")),
        out_shardings=(NamedSharding(on, P()), *(x.sharding for x in operands)),
    )
    first, *others = (run(*operands, dout) for _ in range(3))
    for results in others:
        for x, y in zip(results, first, strict=True):
            reference.assert_same_bits(x, y)
    out, *replicas = (shard.data for shard in first[0].addressable_shards)
    for replica in replicas:
        reference.assert_same_bits(replica, out)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """Partial sums, added or scattered."""
    on = all_gpus(AUTO)
    (lhs, rhs, _), (expected, *_) = on_one_gpu()
    specs = P(None, "x"), P("x")
    total = lambda lhs, rhs: jax.lax.psum(exact_matmul(lhs, rhs), "x")
    scattered = lambda lhs, rhs: jax.lax.psum_scatter(
        exact_matmul(lhs, rhs), "x", scatter_dimension=0, tiled=True
    )
    for function, out_spec in ((total, P()), (scattered, P("x"))):
        cut = jax.shard_map(
            function, mesh=on, in_specs=specs, out_specs=out_spec, check_vma=check_vma
        )
        reference.assert_same_bits(jax.jit(cut)(*place(on, (lhs, rhs), specs)), expected)


def test_gradients_in_shard_map():
    """Those of weights that all shards have are summed over the mesh."""
    on = all_gpus(AUTO)
    operands, expected = on_one_gpu()
    specs = P("x"), P(), P("x")
    cut = jax.shard_map(
        functools.partial(vjp, exact_matmul),
        mesh=on,
        in_specs=specs,
        out_specs=(P("x"), P("x"), P()),
    )
    for x, y in zip(jax.jit(cut)(*place(on, operands, specs)), expected, strict=True):
        reference.assert_same_bits(x, y)


def mesh_program(**environment):
    """A hash of the gradients of a process of its own."""
    run = gpu_cases.run_program(program="mesh_program.py", timeout=200, **environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    return run.stdout


def test_kernels_loaded_beside_collectives(tmp_path):
    """By a process that compiles them, and then by one that finds them on disk."""
    all_gpus(AUTO)
    first, second = (mesh_program(JAX_FP8GEMM_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert first == second


def test_inside_cuda_graphs(tmp_path):
    """Every thunk in a graph: the bits of no graphs."""
    all_gpus(AUTO)
    flags = os.environ.get("XLA_FLAGS", "")
    in_graphs = f"{flags} --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    found = mesh_program(XLA_FLAGS=in_graphs)
    assert "kCommandBuffer" in gpu_cases.thunks(tmp_path), "no CUDA graph was made"
    assert found == mesh_program(XLA_FLAGS=f"{flags} --xla_gpu_enable_command_buffer=")
