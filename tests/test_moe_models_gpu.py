"""Grouped products and the layer at the sizes of real models, under even and uneven routing."""

import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

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


def _shares(routing, experts):
    """Of the experts: even, or as one over their rank."""
    shares = np.ones(experts) if routing == "multinomial" else 1 / np.arange(1, experts + 1)
    return shares / shares.sum()


def _normal(*shape, seed=0, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16)


@routings
@models
def test_products_and_their_weight_gradient(model, routing):
    hidden, inter, experts, top_k = MODELS[model]
    m = TOKENS * top_k
    sizes = np.random.default_rng(0).multinomial(m - 7, _shares(routing, experts))
    group_sizes, ends = jnp.asarray(sizes, jnp.int32), np.cumsum(sizes)
    x, dout = _normal(m, hidden), _normal(m, 2 * inter, seed=1)
    w = _normal(experts, 2 * inter, hidden, seed=2)
    lhs, rhs = jf.quantize(x), jf.quantize(w, block=(128, 128))
    out = jax.jit(jf.scaled_ragged_dot)(lhs, rhs, group_sizes)
    columns = [jf.quantize_ragged(a, group_sizes) for a in (x, dout)]
    grad = jax.jit(jf.scaled_ragged_wgrad)(*columns, group_sizes)
    assert not out[ends[-1] :].any()
    dot = functools.partial(jnp.dot, precision="highest")
    widths = -(-sizes // 128) * 128
    for i in {0, int(sizes.argmax()), experts - 1}:
        rows = slice(ends[i] - sizes[i], ends[i])
        truth = dot(lhs.dequantize()[rows], rhs.dequantize()[i].T)
        assert reference.calc_diff(out[rows], truth) < 1e-5
        tokens = slice(widths[:i].sum(), widths[: i + 1].sum())
        truth = dot(*(c.dequantize()[:, tokens] for c in (columns[0], columns[1].T)))
        assert reference.calc_diff(grad[i], truth) < 1e-5


@functools.cache
def _expert_gradients(activation=jax.nn.silu):
    """The vjp of one expert in f32, without FP8."""

    def expert(x, w_gate_up, w_down):
        gate, up = jnp.split(jnp.dot(x, w_gate_up, precision="highest"), 2, axis=-1)
        return jnp.dot(activation(gate) * up, w_down, precision="highest")

    return jax.jit(lambda x, a, b, dout: (expert(x, a, b), *jax.vjp(expert, x, a, b)[1](dout)))


@routings
@models
def test_the_layer_and_its_gradients(model, routing):
    hidden, inter, experts, top_k = MODELS[model]
    logits = jnp.log(jnp.asarray(_shares(routing, experts), jnp.float32))
    logits = logits[None] + jax.random.gumbel(jax.random.key(3), (TOKENS, experts))
    choice = moe.route(logits, top_k)
    w_gate_up = _normal(experts, hidden, 2 * inter, seed=4, scale=hidden**-0.5)
    w_down = _normal(experts, inter, hidden, seed=5, scale=inter**-0.5)
    x, dout = _normal(TOKENS, hidden), _normal(TOKENS, hidden, seed=6)

    @jax.jit
    def step(x, weights, w_gate_up, w_down, dout):
        layer = lambda x, weights, *experts: moe.moe_layer(x, (choice[0], weights), *experts)
        out, pullback = jax.vjp(layer, x, weights, w_gate_up, w_down)
        return out, *pullback(dout)

    operands = x, choice[1], w_gate_up, w_down, dout
    found = step(*operands)
    for _ in range(5):
        for a, b in zip(step(*operands), found, strict=True):
            gpu_cases.assert_same(a, b)
    out, dx, dweights = (np.zeros(a.shape, np.float32) for a in found[:3])
    f32 = lambda a: jnp.asarray(a, jnp.float32)
    for i in range(experts):
        token, j = np.nonzero(np.asarray(choice[0]) == i)
        weight = f32(choice[1])[token, j][:, None]
        run = _expert_gradients()
        y, dx_i, *dw = run(
            f32(x)[token], f32(w_gate_up[i]), f32(w_down[i]), f32(dout)[token] * weight
        )
        out[token] += y * weight
        dx[token] += dx_i
        dweights[token, j] = (y * f32(dout)[token]).sum(axis=1)
        for a, b in zip(found[3:], dw, strict=True):
            # FP8 keeps 4 bits: relative errors of 2.6 % in each operand of three products in a row.
            assert reference.calc_diff(a[i], b) < 4e-3
    for a, b in zip(found[:3], (out, dx, dweights), strict=True):
        assert reference.calc_diff(a, b) < 4e-3
