"""implementation="emulate" reaches every product and quantiser of every public op and module."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_fp8gemm as jf
from jax_fp8gemm import linen, moe, nnx

EMULATE = dict(implementation="emulate")
X, W = jnp.ones((8, 128)), jnp.ones((128, 128))
EXPERTS, W_DOWN, SIZES = jnp.ones((2, 128, 256)), jnp.ones((2, 128, 128)), jnp.asarray([3, 5])
LOGITS = jnp.ones((8, 2))
CONFIG = moe.configs.DEEPSEEK_V3.scaled_down(num_experts=16)


def _rows(x):
    return jf.quantize(x, **EMULATE)


def _weights(w):
    return jf.quantize(w, block=(128, 128), **EMULATE)


def _columns(x):
    return jf.quantize_ragged(x, SIZES, **EMULATE)


def _of_groups(lhs, rhs, group_sizes, **how):
    dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jf.ragged_dot_general(lhs, rhs, group_sizes, dims, **how)


def _nnx_moe(x):
    from flax import nnx as flax_nnx

    return nnx.MoE(CONFIG, rngs=flax_nnx.Rngs(0), **EMULATE)(x)


def _linen_dense(x):
    layer = linen.Dense(128, use_bias=False, **EMULATE)
    return layer.apply(layer.init(jax.random.key(0), x), x)


PRODUCTS = {
    "matmul": lambda x: jf.matmul(x, W, **EMULATE),
    "dot_general": lambda x: jf.dot_general(x, W, (((1,), (0,)), ((), ())), **EMULATE),
    "einsum": lambda x: jf.einsum("mk,kn->mn", x, W, **EMULATE),
    "ragged_dot": lambda x: jf.ragged_dot(x, EXPERTS, SIZES, **EMULATE),
    "ragged_dot_general": lambda x: _of_groups(x, X, SIZES, **EMULATE),
    "gated_mlp": lambda x: moe.gated_mlp(x, EXPERTS[0], W_DOWN[0], **EMULATE),
    "moe_mlp": lambda x: moe.moe_mlp(x, EXPERTS, W_DOWN, SIZES, **EMULATE),
    "moe_layer": lambda x: moe.moe_layer(x, LOGITS, EXPERTS, W_DOWN, top_k=1, **EMULATE),
    "nnx.MoE": _nnx_moe,
    "linen.Dense": _linen_dense,
}
QUANTISED = {
    "scaled_matmul": lambda x: jf.scaled_matmul(_rows(x), _weights(W), **EMULATE),
    "scaled_ragged_dot": lambda x: jf.scaled_ragged_dot(
        _rows(x), _weights(EXPERTS.swapaxes(1, 2)), SIZES, **EMULATE
    ),
    "scaled_ragged_wgrad": lambda x: jf.scaled_ragged_wgrad(
        _columns(x), _columns(X), SIZES, **EMULATE
    ),
    "quantize_both": lambda x: jf.quantize_both(x, **EMULATE)[0].dequantize(),
    "quantize_weight": lambda x: jf.matmul(X, jf.quantize_weight(x.T @ x, **EMULATE), **EMULATE),
}
LOSSES = {
    f"gradient of {name}": partial(lambda run, x: jax.grad(lambda x: run(x).sum())(x), run)
    for name, run in PRODUCTS.items()
    if name in ("matmul", "ragged_dot", "moe_mlp", "moe_layer")
}
ALL = PRODUCTS | QUANTISED | LOSSES


@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
def test_neither_a_reference_nor_a_kernel_is_in_the_program(run):
    """A fallback would warn, and a warning is an error here."""
    traced = jax.jit(run).trace(X)
    functions = set(re.findall(r"@(\w+_emulation|\w+_reference)", traced.lower().as_text()))
    assert functions and not {name for name in functions if name.endswith("_reference")}
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @jax_fp8gemm_" not in text
