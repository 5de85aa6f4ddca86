"""How many lines a program grows by with each layer of a model, where the reference runs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_fp8gemm.nnx
from jax_fp8gemm.moe import configs


class Mlp(nnx.Module):
    """A SwiGLU MLP of two products, beside a residual."""

    def __init__(self, rngs, dot_general):
        how = dict(use_bias=False, dtype=jnp.bfloat16, dot_general=dot_general, rngs=rngs)
        self.gate_up, self.down = nnx.Linear(256, 512, **how), nnx.Linear(256, 256, **how)

    def __call__(self, x):
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)


def mlp(form, rngs):
    products = {"fp8": jax_fp8gemm.dot_general, "lax": jax.lax.dot_general}
    return Mlp(rngs, products[form])


def moe(form, rngs):
    config = configs.MIXTRAL_8X7B.scaled_down()
    recipe = {"fp8": "deepseek_v3", "lax": "bf16"}[form]
    return jax_fp8gemm.nnx.MoE(config, dtype=jnp.bfloat16, recipe=recipe, rngs=rngs)


def num_lines(block, form, num_layers):
    """The lines of the program of a gradient."""
    make = lambda: nnx.List([block(form, nnx.Rngs(0)) for _ in range(num_layers)])
    graph, state = nnx.split(nnx.eval_shape(make))

    def loss(state, x):
        for layer in nnx.merge(graph, state):
            x = layer(x)
        return x.astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((256, 256 if block is mlp else 128), jnp.bfloat16)
    lowered = jax.jit(jax.grad(loss)).trace(state, x).lower(lowering_platforms=("cpu",))
    return lowered.as_text().count("\n")


@pytest.mark.parametrize("block", [mlp, moe])
def test_layers_share_the_functions_of_the_references(block):
    slopes = {}
    for form in ("fp8", "lax"):
        few, many = (num_lines(block, form, num_layers) for num_layers in (4, 8))
        slopes[form] = (many - few) / 4
    assert 0 < slopes["fp8"] <= 3 * slopes["lax"], slopes
