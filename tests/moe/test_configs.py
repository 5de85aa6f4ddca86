"""The presets: their sizes against published totals, and each as a small block that runs."""

import jax
import numpy as np
import pytest
from errors import raises
from test_moe import random

from jax_fp8gemm.moe import configs, moe_layer

# The published number of parameters, in 1e9, and the number of layers that route.
TOTALS = {
    "DEEPSEEK_V3": (671, 58),
    "DEEPSEEK_V4_FLASH": (284, 43),
    "DEEPSEEK_V4_PRO": (1600, 61),
    "KIMI_K2": (1040, 60),
    "GLM_5": (744, 75),
    "QWEN3_235B_A22B": (235, 94),
    "QWEN3_30B_A3B": (30.5, 48),
    "GPT_OSS_120B": (116.8, 36),
    "LLAMA_4_MAVERICK": (400, 24),
    "MIXTRAL_8X7B": (46.7, 32),
}


def test_every_preset_is_here():
    found = {name for name, value in vars(configs).items() if isinstance(value, configs.MoEConfig)}
    assert found == set(TOTALS)


@pytest.mark.parametrize("name", TOTALS)
def test_routed_experts_are_nearly_all_of_the_model(name):
    """The rest is attention, embeddings and shared experts: 1 % to 5 %."""
    config, (total, layers) = getattr(configs, name), TOTALS[name]
    routed = 3 * config.hidden * config.intermediate * config.num_experts * layers / 1e9
    assert 0.95 * total < routed < 0.99 * total


@pytest.mark.parametrize("name", TOTALS)
def test_each_preset_runs_scaled_down(name):
    config = getattr(configs, name).scaled_down(hidden=32, intermediate=16)
    d, f, e = config.hidden, config.intermediate, config.num_experts
    assert 2 * config.top_k <= e <= 64
    experts = random(e, d, 2 * f, seed=2, scale=d**-0.5), random(e, f, d, seed=3, scale=f**-0.5)
    x, logits = random(8, d), random(8, e, seed=1)
    bias = random(e, seed=4, scale=0.1) if config.has_balance_bias else None
    layer = lambda *operands: moe_layer(*operands, bias=bias, return_load=True, **config.routing)
    out, load = jax.jit(layer)(x, logits, *experts)
    assert out.shape == (8, d) and np.all(np.isfinite(out))
    assert load.sum() == 8 * config.top_k


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            dict(top_k=8),
            ValueError,
            r"top_k must be an integer, 1..num_experts; got 8, num_experts 4$",
        ),
        (dict(top_k=2.0), ValueError, "top_k must be an integer, 1..num_experts; got 2.0, "),
        (dict(scoring="foo"), ValueError, "scoring must be 'softmax', .*; got 'foo'$"),
        (dict(activation="relu"), ValueError, "activation must be 'silu', .*; got 'relu'$"),
        (dict(hidden=0), ValueError, "hidden must be an integer, 1 or more; got 0$"),
        (dict(intermediate=64.0), ValueError, "intermediate must be an integer, .*; got 64.0$"),
        (dict(num_shared_experts=-1), ValueError, "num_shared_experts .*, 0 or more; got -1$"),
        (dict(n_group=2), ValueError, "n_group and topk_group must go together; got "),
        (
            dict(n_group=3, topk_group=1),
            ValueError,
            "n_group must divide the experts .*; got 3, num_experts 4$",
        ),
        (
            dict(n_group=2, topk_group=1, top_k=3),
            ValueError,
            "top_k must be at most the 2 experts .*; got 3$",
        ),
        (dict(scale=0.0), ValueError, "scale must be above 0 and finite in f32; got 0.0$"),
        (dict(normalize="yes"), TypeError, "normalize must be True or False; got 'yes'$"),
        (dict(has_balance_bias=1), TypeError, "has_balance_bias must be True or False; got 1$"),
        (dict(weighs_tokens=None), TypeError, "weighs_tokens must be True or False; got None$"),
    ],
)
def test_a_block_that_cannot_be_is_refused_when_it_is_made(arguments, error, message):
    sizes = dict(hidden=64, intermediate=32, num_experts=4, top_k=2)
    with raises(error, match=f"^MoEConfig: {message}"):
        configs.MoEConfig(**sizes | arguments)


def test_scaled_down_refuses_fewer_experts_than_the_router_chooses():
    with raises(
        ValueError,
        match="^MoEConfig: top_k must be an integer, 1..num_experts; got 2, num_experts 1",
    ):
        configs.MIXTRAL_8X7B.scaled_down(num_experts=1)


def test_scaled_down_keeps_what_is_no_size():
    config = configs.DEEPSEEK_V3.scaled_down()
    assert (config.hidden, config.intermediate, config.num_experts) == (128, 128, 32)
    assert config.routing == configs.DEEPSEEK_V3.routing
    assert configs.MIXTRAL_8X7B.scaled_down(num_experts=6).num_experts == 6


def test_routing_is_that_of_moe_layer():
    assert configs.KIMI_K2.routing == dict(
        top_k=8, scoring="sigmoid", normalize=True, n_group=1, topk_group=1, scale=2.827
    )
    assert isinstance(hash(configs.KIMI_K2), int)
