"""moe.block against NumPy and float64: router, experts and shared experts of published models."""

import dataclasses
from functools import partial

import gated_activations
import jax
import jax.numpy as jnp
import numpy as np
import published_routers as published
import pytest
import reference
from errors import raises
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh

from jax_fp8gemm import BF16, DEEPSEEK_V3
from jax_fp8gemm.moe import block, configs

M = 48
# Three products in a row of values that e4m3 rounds by 2.6 % (root mean square); below the smaller
# number nothing can have been FP8. calc_diff is half the square of a relative error.
FP8 = 1e-4, 4e-3

MODELS = {
    "DeepSeek-V3": (configs.DEEPSEEK_V3, published.deepseek_v3),
    "DeepSeek-V4-Flash": (configs.DEEPSEEK_V4_FLASH, published.deepseek_v4),
    "gpt-oss-120b": (configs.GPT_OSS_120B, published.gpt_oss),
    "Llama 4 Maverick": (configs.LLAMA_4_MAVERICK, published.llama_4),
}


def _problem(config):
    """Random parameters, and tokens whose logits are no near-ties."""
    rng = np.random.default_rng(0)
    shapes = block.parameter_shapes(config)
    spread = lambda shape: shape[-2] ** -0.5 if len(shape) > 1 else 0.1
    draw = lambda shape, spread: (spread * rng.standard_normal(shape)).astype(np.float32)
    parameters = {name: draw(shape, spread(shape)) for name, shape in shapes.items()}
    return jax.tree.map(jnp.asarray, (parameters, draw((M, config.hidden), 1.0)))


def _truth(config, router, parameters, x):
    p, x = jax.tree.map(lambda value: np.asarray(value, np.float64), (parameters, x))

    def mlp(token, gate_up, down, b_gate_up=0.0, b_down=0.0):
        gate, up = np.split(token @ gate_up + b_gate_up, 2)
        return gated_activations.gated(gate, up, config.activation) @ down + b_down

    out = np.zeros_like(x)
    biases = [p["balance_bias"]] if config.has_balance_bias else []
    for i, token in enumerate(x):
        logits = token @ p["router"] + p.get("router_bias", 0.0)
        for expert, weight in zip(*router(logits, *biases), strict=True):
            experts = [p[name][expert] for name in ("w_gate_up", "w_down")]
            if config.has_expert_biases:
                experts += [p[name][expert] for name in ("b_gate_up", "b_down")]
            if config.weighs_tokens:
                out[i] += mlp(weight * token, *experts)
            else:
                out[i] += weight * mlp(token, *experts)
        if config.num_shared_experts:
            out[i] += mlp(token, p["shared_gate_up"], p["shared_down"])
    return out


@pytest.mark.parametrize("name", MODELS)
def test_a_published_block_is_that_of_float64(name):
    preset, router = MODELS[name]
    config = preset.scaled_down(num_experts=16)
    parameters, x = _problem(config)
    expected = _truth(config, router, parameters, x)
    run = lambda recipe: jax.jit(partial(block.apply_block, config, recipe=recipe))(parameters, x)
    low, high = FP8
    assert low < reference.calc_diff(run(DEEPSEEK_V3), expected) < high
    assert reference.calc_diff(run(BF16), expected) < 1e-9  # f32 throughout


def test_the_load_counts_every_choice():
    config = configs.DEEPSEEK_V3.scaled_down(num_experts=16)
    parameters, x = _problem(config)
    out, load = block.apply_block(config, parameters, x.reshape(2, M // 2, -1), return_load=True)
    assert out.shape == (2, M // 2, config.hidden)
    logits = np.asarray(x, np.float64) @ np.asarray(parameters["router"], np.float64)
    bias = np.asarray(parameters["balance_bias"])
    chosen = [published.deepseek_v3(token, bias)[0] for token in logits]
    np.testing.assert_array_equal(load, np.bincount(np.concatenate(chosen), minlength=16))


def test_a_block_that_weighs_tokens_on_an_explicit_mesh():
    """Whose layer cuts the tokens by more axes than they were cut by."""
    config = configs.LLAMA_4_MAVERICK.scaled_down(num_experts=16)
    parameters, x = _problem(config)
    run = partial(block.apply_block, config, expert_axis="y", recipe=BF16)
    on = mesh(AxisType.Explicit, AxisType.Explicit, shape=(2, 4))
    parameters, x = jax.tree.map(np.asarray, (parameters, x))
    expected = jax.jit(partial(block.apply_block, config, recipe=BF16))(parameters, x)
    with jax.set_mesh(on):
        found = jax.jit(run)(parameters, jax.device_put(x, P("x")))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_tokens_are_weighed_for_one_choice_only():
    config = configs.LLAMA_4_MAVERICK.scaled_down(num_experts=4)
    parameters, x = _problem(config)
    config = dataclasses.replace(config, top_k=2)
    with pytest.raises(ValueError, match="weighs_tokens must have top_k 1; got 2"):
        block.apply_block(config, parameters, x)


@pytest.mark.parametrize("shape", [(4, 127), (128, 4), ()])
def test_tokens_of_another_width_are_refused(shape):
    config = configs.MIXTRAL_8X7B.scaled_down()
    parameters, _ = _problem(config)
    got = ",".join(map(str, shape))
    message = rf"^moe.block: x must be \(..., d\) with d = 128, .*; got x f32\[{got}\]$"
    with raises(ValueError, match=message):
        block.apply_block(config, parameters, jnp.ones(shape))


def test_tokens_that_are_no_array_are_refused():
    with raises(TypeError, match="^moe.block: x must be an array; got list. jnp.asarray makes"):
        block.apply_block(configs.MIXTRAL_8X7B.scaled_down(), {}, [1.0])


@pytest.mark.parametrize("left_out, added", [("w_down", {}), (None, dict(bias=0))])
def test_parameters_with_other_names_are_refused(left_out, added):
    config = configs.MIXTRAL_8X7B.scaled_down()
    parameters, x = _problem(config)
    parameters = {name: p for name, p in parameters.items() if name != left_out} | added
    message = "^moe.block: parameters must be router, w_gate_up, w_down, as .*; got router, w_"
    with raises(ValueError, match=message):
        block.apply_block(config, parameters, x)


@pytest.mark.parametrize("name", MODELS)
def test_initial_matrices_are_those_of_one_linear_layer_each(name):
    config = MODELS[name][0].scaled_down(num_experts=16)
    init = jax.nn.initializers.lecun_normal()
    for parameter, shape in block.parameter_shapes(config).items():
        value = block.initial_parameter(jax.random.key(1), parameter, shape, jnp.bfloat16, init)
        is_routers = parameter in ("router", "router_bias", "balance_bias")
        assert value.dtype == (jnp.float32 if is_routers else jnp.bfloat16)
        value = np.asarray(value, np.float64)
        if "bias" in parameter or parameter.startswith("b_"):
            assert not value.any()
        else:  # variance 1 / fan-in; 16 experts of 128 x 128 give 0.3 %
            assert abs(value.var() * shape[-2] - 1) < 0.1


@pytest.mark.parametrize("run", [block.parameter_shapes, lambda c: block.apply_block(c, {}, None)])
def test_a_name_is_no_config(run):
    with raises(TypeError, r"config must be a moe.configs.MoEConfig; got 'MIXTRAL_8X7B'"):
        run("MIXTRAL_8X7B")
