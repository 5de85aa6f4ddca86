"""Products on a mesh under vmap, scan and remat, called eagerly, and on a mesh of mixed axes."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import reference
from assertions import REORDERED
from errors import raises
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from test_partition import (
    AUTO,
    EXPLICIT,
    K,
    M,
    N,
    both_axis_types,
    compile_and_run,
    exact,
    exact_matmul,
    on_mesh,
    place,
    product,
)
from xla_options import QUICK_FLAGS

from jax_fp8gemm import dot_general


@both_axis_types
def test_batch_dimensions(axis_type):
    on = on_mesh(axis_type)
    lhs, rhs = exact(8, 128, 256), exact(8, 256, 136, seed=1)
    for operands, specs in (
        ((lhs, rhs), (P("x"), P("x"))),
        ((lhs, rhs[0]), (P("x"), P())),
        ((lhs[0], rhs[..., :128]), (P(), P("x"))),
    ):
        compiled, out = compile_and_run(exact_matmul, *place(on, operands, specs))
        assert collectives(compiled) == []
        reference.assert_same_bits(out, product(*operands))
    cut = place(on, (lhs, rhs), (P("x"), P("x")))
    mapped = jax.vmap(jax.vmap(exact_matmul, (0, None)), (0, 0))
    out = jax.jit(mapped)(cut[0][:, :, None], cut[1])
    reference.assert_same_bits(out[:, :, 0], product(lhs, rhs))
    dims = (((2,), (1,)), ((0,), (0,)))
    out = jax.jit(functools.partial(dot_general, dimension_numbers=dims))(*cut)
    reference.assert_same_bits(out, dot_general(lhs, rhs, dims))


def test_layers_in_a_scan_with_remat():
    """Weights sharded over the axis of the rows are gathered in each step, as FP8."""
    on = on_mesh(EXPLICIT)
    x, weights = exact(M, 512), exact(3, 512, 512, seed=1) / 2**10

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(exact_matmul(x, w)), None

    def gradients(x, weights):
        return jax.grad(lambda x, w: jax.lax.scan(layer, x, w)[0].sum(), (0, 1))(x, weights)

    cut = place(on, (x, weights), (P("x"), P(None, "x")))
    compiled, found = compile_and_run(gradients, *cut)
    gathered = {text for text in collectives(compiled) if "all-gather" in text}
    assert gathered == {"all-gather f8e4m3fn[512,512]", "all-gather f32[4,4]"}
    for a, b in zip(found, jax.jit(gradients)(x, weights), strict=True):
        # tanh and sums of its gradients round; the order of the sums differs.
        assert reference.calc_diff(a, b) < REORDERED


def test_eager_calls_on_sharded_arrays():
    operands = exact(M, K), exact(K, N, seed=1)
    for specs in ((P("x"), P(None, "y")), (P(None, "x"), P("x"))):
        out = exact_matmul(*place(on_mesh(AUTO), operands, specs))
        reference.assert_same_bits(out, product(*operands))


def test_a_mesh_of_auto_and_explicit_axes():
    operands = exact(M, K), exact(K, N, seed=1)
    on = mesh(AUTO, EXPLICIT, shape=(4, 2))
    compiled, out = compile_and_run(exact_matmul, *place(on, operands, (P("x"), P(None, "y"))))
    assert collectives(compiled) == []
    assert out.sharding.is_equivalent_to(NamedSharding(on, P("x", "y")), 2)
    reference.assert_same_bits(out, product(*operands))


@both_axis_types
def test_without_shardy(axis_type):
    """GSPMD is refused: with it JAX 0.10.2 aborts the process. shard_map needs no partitioner."""
    on = on_mesh(axis_type)
    operands = place(on, (exact(M, K), exact(K, N, seed=1)), (P("x"), P()))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        message = "quantize: jit over 8 devices must partition by Shardy; got .*=False. Leave it"
        for run in (exact_matmul, jax.jit(exact_matmul)):
            with raises(NotImplementedError, match=message):
                run(*operands)
        on_shards = jax.shard_map(exact_matmul, mesh=on, in_specs=(P("x"), P()), out_specs=P("x"))
        out = jax.jit(on_shards)(*operands)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    reference.assert_same_bits(out, product(*operands))


_BEGIN = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_fp8gemm import dot_general, matmul
put = lambda x, *spec: jax.device_put(x, NamedSharding(on, P(*spec)))
"""
_GRADIENT = """
on = jax.make_mesh((1, 8), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
lhs = put(jnp.ones((8, 64, 1040)), None, ("x", "y"))
rhs = put(jnp.ones((8, 1040, 256)), ("y", "x"))
jax.jit(jax.grad(lambda x, y: matmul(x, y).sum(), (0, 1))).lower(lhs, rhs).compile()
"""
_UNREDUCED = """
on = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
lhs, rhs = put(jnp.ones((8, 2)), None, "y"), put(jnp.ones((2, 8)), "y")
how = dict(out_sharding=P(unreduced={"y"}), _dot_general=dot_general)
product = lambda x, y: jnp.einsum("mk,kn->mn", x, y, **how)
def compile_in(num_calls):
    if num_calls:
        return compile_in(num_calls - 1)
    with jax.set_mesh(on):
        jax.jit(product).lower(lhs, rhs).compile()
for num_calls in range(6, 14):
    compile_in(num_calls)
    jax.clear_caches()
"""
_END = "print(jax.config.jax_traceback_in_locations_limit)"


@pytest.mark.parametrize("program", [_GRADIENT, _UNREDUCED])
def test_a_program_with_source_lines_compiles(program):
    """The first did not end with JAX 0.10.2, and the second with 0.11.1, in nine calls.

    What helps leaves the caller's setting alone.
    """
    flags = " ".join(["--xla_force_host_platform_device_count=8", *QUICK_FLAGS])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "ignore", "-c", _BEGIN + program + _END]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, "100"), run.stderr
