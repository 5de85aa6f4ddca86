"""route and the presets of moe.configs against the published routers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import published_routers as published
import pytest

from jax_fp8gemm.moe import configs, route

M = 64
# A few roundings of f32 in the scores, in their sum and in the weight, relative to the weight.
ROUNDINGS = 2e-6

ROUTERS = {
    "DeepSeek-V3": (published.deepseek_v3, configs.DEEPSEEK_V3),
    "DeepSeek-V4-Flash": (published.deepseek_v4, configs.DEEPSEEK_V4_FLASH),
    "DeepSeek-V4-Pro": (partial(published.deepseek_v4, scale=2.5), configs.DEEPSEEK_V4_PRO),
    "Kimi K2": (published.kimi_k2, configs.KIMI_K2),
    "GLM-5": (published.glm_5, configs.GLM_5),
    "Qwen3-235B-A22B": (published.qwen3_moe, configs.QWEN3_235B_A22B),
    "Qwen3-30B-A3B": (published.qwen3_moe, configs.QWEN3_30B_A3B),
    "Mixtral 8x7B": (published.mixtral, configs.MIXTRAL_8X7B),
    "gpt-oss-120b": (published.gpt_oss, configs.GPT_OSS_120B),
    "Llama 4 Maverick": (published.llama_4, configs.LLAMA_4_MAVERICK),
}


def problem(config, spread=1.0):
    """Logits (m, num_experts) and a bias, or None.

    The logits of a token are at equal distances, so that none is nearly another. Sums of a score
    and a bias are nearly equal by chance only: 1e-7, where neighbours are 1e-3 apart.
    """
    rng = np.random.default_rng(config.num_experts)
    grid = np.linspace(-spread, spread, config.num_experts)
    logits = np.stack([rng.permutation(grid) for _ in range(M)]).astype(np.float32)
    if not config.has_balance_bias:
        return logits, None
    return logits, (rng.permutation(grid) * 0.3).astype(np.float32)


def expected(router, logits, bias):
    args = () if bias is None else (bias.astype(np.float64),)
    chosen = [router(token, *args) for token in logits.astype(np.float64)]
    return tuple(map(np.stack, zip(*chosen, strict=True)))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_indices_and_weights(name, spread):
    router, config = ROUTERS[name]
    logits, bias = problem(config, spread)
    indices, weights = jax.jit(lambda *args: route(args[0], bias=args[1], **config.routing))(
        logits, bias
    )
    expected_indices, expected_weights = expected(router, logits, bias)
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_allclose(weights, expected_weights, rtol=ROUNDINGS)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_gradient_is_that_of_the_published_weights(name):
    """Against differences of float64: the choices stay, since the step is far below any gap."""
    router, config = ROUTERS[name]
    logits, bias = problem(config)
    rng = np.random.default_rng(0)
    direction = rng.normal(size=logits.shape)
    dweights = rng.normal(size=(M, config.top_k))
    weights = lambda x: route(x, bias=bias, **config.routing)[1]
    (found,) = jax.vjp(weights, jnp.asarray(logits))[1](jnp.asarray(dweights, jnp.float32))

    def along(step):
        moved = logits + step * direction
        args = () if bias is None else (bias.astype(np.float64),)
        return np.stack([router(token, *args)[1] for token in moved])

    slopes = (along(1e-6) - along(-1e-6)) / 2e-6
    # Token by token. 1e-6: roundings of f32 on both sides of 100 products of about 1.
    np.testing.assert_allclose(
        (np.asarray(found) * direction).sum(axis=1), (slopes * dweights).sum(axis=1), atol=2e-6
    )
