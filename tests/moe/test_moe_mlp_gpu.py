"""moe_mlp by its kernels, forward and backward."""

import jax.numpy as jnp
import pytest
import reference
from assertions import GPU_MLP
from gated_activations import NAMES, OTHERS
from moe_cases import problem, run, truth
from test_grouped_gpu import SIZES, M

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
