"""gated_mlp by its kernels, on one GPU and on several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import GPU_MLP, assert_all_same_bits
from gated_activations import NAMES, OTHERS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import all_gpus, collectives
from moe_cases import problem, truth

from jax_fp8gemm import DEEPSEEK_V3, Recipe
from jax_fp8gemm.moe import gated_mlp, moe_mlp

pytestmark = pytest.mark.gpu

SQUARE_LHS = Recipe(wgrad_lhs_block=(128, 128))
RECIPES = (DEEPSEEK_V3, SQUARE_LHS, Recipe(kept_gate_up="fp8"), Recipe(bwd="e5m2", pow2_scale=True))


def operands_of(m, dtype=jnp.bfloat16, d=384, f=256):
    x, w_gate_up, w_down, dout = problem(dtype, m=m, d=d, f=f, g=1)
    return x, w_gate_up[0], w_down[0], dout


@functools.partial(jax.jit, static_argnames=("recipe", "activation"))
def dense_vjp(x, w_gate_up, w_down, dout, recipe=DEEPSEEK_V3, activation="silu"):
    mlp = functools.partial(gated_mlp, recipe=recipe, activation=activation)
    out, pullback = jax.vjp(mlp, x, w_gate_up, w_down)
    return out, *pullback(dout)


@functools.partial(jax.jit, static_argnames="recipe")
def grouped_vjp(x, w_gate_up, w_down, dout, recipe):
    sizes = jnp.full((1,), x.shape[0], jnp.int32)
    mlp = lambda x, *ws: moe_mlp(x, *(w[None] for w in ws), sizes, recipe=recipe)
    out, pullback = jax.vjp(mlp, x, w_gate_up, w_down)
    return out, *pullback(dout)


@pytest.mark.parametrize("activation", ("silu", *OTHERS), ids=("silu", *NAMES))
@pytest.mark.parametrize("m", [1003, 512])
def test_value_and_gradients_are_those_of_the_fake_quantised_mlp(activation, m):
    x, w_gate_up, w_down, dout = operands_of(m)
    found = dense_vjp(x, w_gate_up, w_down, dout, activation=activation)
    grouped = x, w_gate_up[None], w_down[None], dout
    expected = truth(grouped, (m,), activation=activation)
    shapes = x.shape, x.shape, w_gate_up.shape, w_down.shape
    for actual, y, shape in zip(found, expected, shapes, strict=True):
        assert (actual.dtype, actual.shape) == (jnp.bfloat16, shape)
        assert reference.calc_diff(actual, y.reshape(shape)) < GPU_MLP


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("m", [1, 17, 128, 333, 1000, 1003, 4096])
def test_it_has_the_bits_of_a_moe_mlp_of_one_group(recipe, m):
    operands = operands_of(m)
    assert_all_same_bits(dense_vjp(*operands, recipe=recipe), grouped_vjp(*operands, recipe))


@pytest.mark.parametrize("m", [1, 4, 8])
def test_few_tokens_have_the_same_bits_without_a_gradient(m):
    """The first product then quantises them itself. Its 4096 columns get tiles of 32."""
    x, w_gate_up, w_down, dout = operands_of(m, d=4096, f=2048)
    expected = dense_vjp(x, w_gate_up, w_down, dout)[0]
    assert_all_same_bits([jax.jit(gated_mlp)(x, w_gate_up, w_down)], [expected])


def test_widths_of_no_whole_blocks_and_f32():
    operands = operands_of(300, jnp.float32, d=184, f=328)
    found = dense_vjp(*operands)
    assert_all_same_bits(found, grouped_vjp(*operands, DEEPSEEK_V3))
    x, w_gate_up, w_down, dout = operands
    expected = truth((x, w_gate_up[None], w_down[None], dout), (300,))
    for actual, y in zip(found, expected, strict=True):
        assert reference.calc_diff(actual, y.reshape(actual.shape)) < GPU_MLP


def test_a_thousand_runs_have_the_same_bits():
    operands = operands_of(1003)
    first = dense_vjp(*operands)
    for _ in range(1000):
        last = dense_vjp(*operands)
    assert_all_same_bits(last, first)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_tokens_and_weights_over_one_axis(axis_type, recipe):
    """Rows have the bits of one GPU. Gradients of weights are added up in another order."""
    rows = NamedSharding(all_gpus(axis_type), P("x"))
    operands = operands_of(8192, d=1024, f=2048)
    expected = jax.device_get(dense_vjp(*operands, recipe=recipe))
    placed = [jax.device_put(np.asarray(x), rows) for x in operands]
    shardings = {} if axis_type == AxisType.Explicit else dict(out_shardings=(rows,) * 4)
    run = functools.partial(dense_vjp.__wrapped__, recipe=recipe)
    compiled = jax.jit(run, **shardings).lower(*placed).compile()
    moved = collectives(compiled)
    assert not [array for array in moved if "[8192" in array], moved
    for _ in range(20):
        found = compiled(*placed)
    assert_all_same_bits(found[:2], expected[:2])
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert reference.calc_diff(x, y) < 2e-6  # of bf16: both round f32 sums
