"""Batch-invariant routers, sums and layers on a GPU: the bits of NumPy, in any batch."""

from functools import partial

import gpu_cases
import jax
import jax.numpy as jnp
import pytest
import second_stream
import test_batch_invariant_layer as layers
import test_batch_invariant_route as routes

from jax_fp8gemm import moe

pytestmark = pytest.mark.gpu

BATCHES = (1, 17, 333, 4096)
REPEATS = 1000


@routes.normalizes
@routes.scorings
def test_the_router_has_the_bits_of_the_model(scoring, normalize):
    routes.test_the_bits_are_those_of_the_model(scoring, normalize)


def test_programs_and_batches_change_no_bit_of_the_router():
    routes.test_the_programs_around_change_no_bit()
    routes.test_the_batch_changes_no_bit()


@pytest.mark.parametrize("dtype", layers.DTYPES, ids=str)
def test_unpermute_has_the_bits_of_the_model(dtype):
    layers.test_unpermute_and_its_gradients(dtype)


CONFIG = moe.configs.DEEPSEEK_V3.scaled_down(hidden=1024, intermediate=512)


def _block():
    key, kernel = jax.random.key(0), jax.nn.initializers.lecun_normal()
    parameters = {
        name: moe.block.initial_parameter(key, name, shape, jnp.bfloat16, kernel)
        for name, shape in moe.block.parameter_shapes(CONFIG).items()
    }
    how = dict(recipe=layers.RECIPE, implementation="cuda")

    def step(x, dout):
        run = partial(moe.block.apply_block, CONFIG, parameters, **how)
        out, vjp = jax.vjp(run, x)
        return out, *vjp(dout)

    x, dout = jax.random.normal(key, (2, 4096, CONFIG.hidden), jnp.bfloat16)
    return jax.jit(step), x, dout


def test_a_token_has_the_same_bits_in_any_batch():
    """Its result and its gradient, through router, experts and shared expert."""
    step, x, dout = _block()
    expected = step(x, dout)
    for m in BATCHES:
        for found, whole in zip(step(x[:m], dout[:m]), expected, strict=True):
            gpu_cases.assert_same(found, whole[:m], str(m))


def test_a_layer_has_the_same_bits_in_a_thousand_runs_under_load():
    step, x, dout = _block()
    x, dout = x[:333], dout[:333]
    expected = step(x, dout)
    different = jnp.zeros((), jnp.int32)
    with second_stream.busy():
        for _ in range(REPEATS):
            for found, first in zip(step(x, dout), expected, strict=True):
                different += gpu_cases.count_different(found, first)
    assert different == 0


def test_a_layer_has_the_bits_of_its_emulation():
    operands = layers.layer_operands(40)
    run = lambda implementation: jax.jit(
        partial(layers.step, layers.RECIPE, implementation=implementation)
    )(*operands)
    for found, emulated in zip(run("cuda"), run("emulate"), strict=True):
        gpu_cases.assert_same(found, emulated)
