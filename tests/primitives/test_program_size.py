"""The lines of programs where the reference runs: of a reference, and by how many a layer adds."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_fp8gemm.nnx
from jax_fp8gemm._primitives.gemm import reference
from jax_fp8gemm._primitives.quantize import quantize_p
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


# The lines of the module of each reference, a third more than in JAX 0.10.2: XLA clones a function
# for each of its calls, and takes the longer to compile the more operations it has.
MOST_LINES = {"row": 13, "column": 13, "row_column": 15, "block_both": 15, "gemm": 75}


@pytest.mark.parametrize("name", MOST_LINES)
def test_references_have_few_operations(name):
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    how = dict(e5m2=False, pow2_scale=False, padded=False, implementation="xla")
    values, scale = jax.eval_shape(lambda x: quantize_p(x, mode="row", **how), x)
    square = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    if name == "gemm":
        run = partial(reference, is_1d1d=False, out_dtype=jnp.bfloat16)
        lowered = jax.jit(run).lower(values, scale, values, square)
    else:
        lowered = jax.jit(lambda x: quantize_p(x, mode=name, **how)).lower(x)
    assert lowered.as_text().count("\n") <= MOST_LINES[name]
