"""moe_mlp on a GPU: kernels throughout, against the reference lowering throughout."""

import gpu_cases
import jax
import jax.numpy as jnp
import pytest
import reference
from moe_cases import problem
from test_grouped_gpu import SIZES, M

from jax_fp8gemm.moe import moe_mlp

pytestmark = pytest.mark.gpu


def test_value_and_gradients():
    sizes = jnp.asarray(SIZES["edges"], jnp.int32)
    *operands, _ = problem(jnp.bfloat16, m=M, d=384, f=192, g=len(sizes))

    def loss(x, w_gate_up, w_down, implementation):
        out = moe_mlp(x, w_gate_up, w_down, sizes, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    gradients = lambda implementation: jax.jit(
        lambda *xs: jax.grad(loss, (0, 1, 2), has_aux=True)(*xs, implementation)
    )(*operands)
    found, expected = gradients(gpu_cases.IMPLEMENTATION), gradients("xla")
    # Where gate_up and dh round to other bf16 neighbours, what follows does too: 2^-8 of few.
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert reference.calc_diff(a, e) < 1e-4
