"""Grouped products and the layer at the sizes of real models, under even and uneven routing."""

import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import GPU_LAYER
from jax import lax
from test_expert_parallel import vjp

import jax_fp8gemm as jf
from jax_fp8gemm import moe

pytestmark = pytest.mark.gpu

# hidden, inter, experts (of one device), top_k
MODELS = {
    "DeepSeek-V3": (7168, 2048, 8, 8),
    "Qwen3-30B-A3B": (2048, 768, 16, 8),
    "GLM-4.5": (5120, 1536, 10, 8),
    "gpt-oss-120b": (2880, 2880, 16, 4),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
}
models = pytest.mark.parametrize("model", MODELS)
routings = pytest.mark.parametrize("routing", ("multinomial", "zipf"))
TOKENS = 333


def shares(routing, experts):
    """Of the experts: even, or as one over their rank."""
    parts = np.ones(experts) if routing == "multinomial" else 1 / np.arange(1, experts + 1)
    return parts / parts.sum()


def normal(*shape, seed=0, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16)


@routings
@models
def test_products_and_their_weight_gradient(model, routing):
    hidden, inter, experts, top_k = MODELS[model]
    m = TOKENS * top_k
    # Seven rows of no group.
    sizes = np.random.default_rng(0).multinomial(m - 7, shares(routing, experts))
    group_sizes, ends = jnp.asarray(sizes, jnp.int32), np.cumsum(sizes)
    x, dout = normal(m, hidden), normal(m, 2 * inter, seed=1)
    lhs = jf.quantize(x)
    rhs = jf.quantize(normal(experts, 2 * inter, hidden, seed=2), block=(128, 128))
    out = jf.scaled_ragged_dot(lhs, rhs, group_sizes)
    columns = [jf.quantize_ragged(a, group_sizes) for a in (x, dout)]
    gradient = jf.scaled_ragged_wgrad(*columns, group_sizes)
    assert not out[ends[-1] :].any()
    widths = -(-sizes // 128) * 128  # of the groups' columns
    f32 = lambda a: np.asarray(a.dequantize(), np.float32)
    lhs, *columns = map(f32, (lhs, *columns))
    for i in {0, int(sizes.argmin()), experts - 1}:
        rows = slice(ends[i] - sizes[i], ends[i])
        weights = jf.ScaledArray(rhs.values[i], rhs.scale[i], block=rhs.block)
        assert reference.calc_diff(out[rows], lhs[rows] @ f32(weights).T) < 1e-5
        tokens = slice(widths[:i].sum(), widths[: i + 1].sum())
        x_columns, dout_columns = (a[:, tokens] for a in columns)
        assert reference.calc_diff(gradient[i], x_columns @ dout_columns.T) < 1e-5


def dense(x, router, w_gate_up, w_down):
    """Every expert of every token, weighted, in f32."""
    indices, weights = router
    dot = functools.partial(jnp.dot, precision="highest")

    def add_expert(out, expert):
        i, gate_up, down = expert
        gate, up = jnp.split(dot(x, gate_up), 2, axis=1)
        weight = jnp.sum(jnp.where(indices == i, weights, 0), axis=1, keepdims=True)
        return out + weight * dot(jax.nn.silu(gate) * up, down), None

    numbers = jnp.arange(w_down.shape[0], dtype=indices.dtype)
    return lax.scan(add_expert, jnp.zeros_like(x), (numbers, w_gate_up, w_down))[0]


def compiled_vjp(layer, operands):
    """Without autotuning of XLA's own products."""
    lowered = jax.jit(functools.partial(vjp, layer)).lower(*operands)
    return lowered.compile(compiler_options=gpu_cases.COMPILER_OPTIONS)


@routings
@models
def test_the_layer_and_its_gradients(model, routing):
    hidden, inter, experts, top_k = MODELS[model]
    # By Gumbel noise on logarithms top_k are drawn without replacement, by their shares.
    noise = jax.random.gumbel(jax.random.key(3), (TOKENS, experts))
    logits = noise + jnp.log(jnp.asarray(shares(routing, experts), jnp.float32))[None]
    indices, weights = moe.route(logits, top_k)
    w_gate_up = normal(experts, hidden, 2 * inter, seed=4, scale=hidden**-0.5)
    w_down = normal(experts, inter, hidden, seed=5, scale=inter**-0.5)
    x, dout = normal(TOKENS, hidden), normal(TOKENS, hidden, seed=6)
    operands = x, indices, weights, w_gate_up, w_down, dout
    step = compiled_vjp(moe.moe_layer, operands)
    found = step(*operands)
    for again, first in zip(step(*operands), found, strict=True):
        gpu_cases.assert_same(again, first)
    exact = [a if a is indices else a.astype(jnp.float32) for a in operands]
    for result, truth in zip(found, compiled_vjp(dense, exact)(*exact), strict=True):
        assert reference.calc_diff(result, truth) < GPU_LAYER
