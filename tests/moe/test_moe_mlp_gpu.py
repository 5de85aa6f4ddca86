"""moe_mlp by its kernels, forward and backward."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import reference
from assertions import GPU_MLP, assert_all_same_bits
from gated_activations import NAMES, OTHERS
from kept_gate_up_cases import KEPT, in_one_program, mlp, reference_vjp
from moe_cases import F, problem, run, truth
from test_grouped_gpu import SIZES, M

from jax_fp8gemm import DEEPSEEK_V3, Recipe
from jax_fp8gemm.moe import moe_mlp

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activation", ("silu", *OTHERS), ids=("silu", *NAMES))
def test_value_and_gradients_are_those_of_the_fake_quantised_experts(activation):
    """Against float64: XLA keeps the reference lowering from rounding gate_up and dh to bf16."""
    sizes = SIZES["edges"]
    operands = problem(jnp.bfloat16, m=M, d=384, f=192, g=len(sizes))
    found = run(operands, sizes, activation=activation)
    expected = truth(operands, sizes, activation=activation)
    for actual, y in zip(found, expected, strict=True):
        assert (actual.dtype, actual.shape) == (jnp.bfloat16, y.shape)
        assert reference.calc_diff(actual, y) < GPU_MLP


SQUARE = dict(wgrad_lhs_block=(128, 128))
E5M2 = dict(bwd="e5m2", pow2_scale=True)


@pytest.mark.parametrize("recipe", [{}, SQUARE, E5M2, SQUARE | E5M2], ids=str)
def test_bits_are_those_of_the_emulation(recipe):
    """Of tokens whose sizes differ by orders of magnitude, in groups of 144 to 1 and in none."""
    sizes = jnp.asarray((144, 5, 5, 5, 1), jnp.int32)
    x, *weights, dout = problem(jnp.bfloat16, m=163, d=128, f=299, g=5)
    factors = jnp.exp(3 * jax.random.normal(jax.random.key(5), (163, 1)))
    operands = x * factors.astype(x.dtype), *weights

    @partial(jax.jit, static_argnums=0)
    def run(implementation, operands, dout):
        how = dict(recipe=Recipe(**recipe), implementation=implementation)
        out, pullback = jax.vjp(lambda *args: moe_mlp(*args, sizes, **how), *operands)
        return out, *pullback(dout)

    assert_all_same_bits(run("cuda", operands, dout), run("emulate", operands, dout))


def test_gradients_are_those_of_a_gate_up_that_numpy_rounds():
    """XLA on a GPU removes a rounding to FP8 that it sees being undone."""
    *operands, dout = problem(jnp.bfloat16)
    found = in_one_program(mlp(KEPT), operands, dout)
    assert_all_same_bits(found, reference_vjp(mlp(DEEPSEEK_V3), operands, dout, 2 * F))


def test_layers_one_after_another_keep_gate_up_in_fp8():
    """Without a loop XLA chooses when gate_up is quantised, and when its values are read."""
    layers, rows, f = 8, 1000, 2048
    x, w_gate_up, w_down, _ = problem(jnp.bfloat16, m=rows, f=f)
    weights = [(w_gate_up, w_down)] * layers

    def temp_bytes(recipe):
        def loss(x, weights):
            for pair in weights:
                x = x + mlp(recipe)(x, *pair)
            return x.astype(jnp.float32).sum()

        compiled = jax.jit(jax.grad(loss)).lower(x, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    saved = temp_bytes(DEEPSEEK_V3) - temp_bytes(KEPT)
    # But for the layer whose backward pass runs, which has gate_up both ways.
    assert saved > 0.9 * (layers - 2) * rows * 2 * f * (2 - 1 - 4 / 128)
