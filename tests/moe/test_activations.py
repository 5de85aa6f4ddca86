"""moe_mlp and moe_layer with activations other than SwiGLU, on one device and on many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, assert_diff_below
from errors import raises
from gated_activations import GPT_OSS, NAMES, OTHERS
from moe_cases import SIZES, assert_mlp, problem, run, truth
from test_expert_parallel import auto_mesh
from test_expert_parallel import problem as layer_problem
from test_expert_parallel import vjp as layer_vjp

from jax_fp8gemm import BF16, DEEPSEEK_V3
from jax_fp8gemm.moe import moe_layer, moe_mlp

activations = pytest.mark.parametrize("activation", OTHERS, ids=NAMES)


def large_problem():
    """With gates and ups of up to 15, beyond the bounds."""
    x, w_gate_up, w_down, dout = problem()
    return x, 5 * w_gate_up, w_down, dout


@activations
def test_value_and_gradients_are_those_of_the_fake_quantised_experts(activation):
    operands = large_problem()
    found = run(operands, activation=activation)
    assert_mlp(found, truth(operands, activation=activation))


@activations
def test_without_fp8(activation):
    operands = large_problem()
    found = run(operands, recipe=BF16, activation=activation)
    for x, y in zip(found, truth(operands, fp8=False, activation=activation), strict=True):
        assert reference.calc_diff(x, y) < LAYER[BF16]


@activations
def test_expert_parallel_equals_one_device(activation):
    """Nearly: tokens travel with power-of-two scales."""
    layer = functools.partial(moe_layer, activation=activation)
    on_mesh = functools.partial(layer, expert_axis="x", mesh=auto_mesh(4))
    found, expected = (
        jax.jit(functools.partial(layer_vjp, function))(*layer_problem())
        for function in (on_mesh, layer)
    )
    assert_diff_below(LAYER[DEEPSEEK_V3], found, expected)


def test_the_layer_is_another_one_with_each_activation():
    x, indices, probs, *weights, _ = layer_problem()
    layer = functools.partial(moe_layer, x, (indices, probs), *weights, recipe=BF16)
    outs = [layer(activation=activation) for activation in ("silu", *OTHERS[:3], GPT_OSS)]
    for i, out in enumerate(outs):
        # The two forms of gelu are nearest to each other.
        assert all(reference.calc_diff(out, other) > 10 * LAYER[BF16] for other in outs[:i])


@pytest.mark.parametrize("activation", ("swish", None, jax.nn.silu, np.ones(3)))
def test_other_activations_raise(activation):
    message = "activation must be 'silu', 'gelu', 'gelu_tanh', 'relu2' or a moe.ClampedSwiglu; got"
    with raises(ValueError, f"moe_mlp: {message}"):
        moe_mlp(*problem()[:3], jnp.asarray(SIZES), activation=activation)
    x, indices, probs, *weights, _ = layer_problem()
    with raises(ValueError, f"moe_layer: {message}"):
        moe_layer(x, (indices, probs), *weights, activation=activation)
