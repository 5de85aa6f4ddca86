"""The problem that all tests of moe_mlp solve, and its solution in float64."""

import functools

import gated_activations
import jax
import jax.numpy as jnp
import numpy as np
import reference
from assertions import MLP, assert_diff_below

from jax_fp8gemm import DEEPSEEK_V3
from jax_fp8gemm.moe import moe_mlp

M, D, F = 200, 256, 96  # d : f of Qwen3-30B-A3B; the second block of 2 f holds gates and ups
SIZES = (0, 70, 0, 101, 9)  # 20 rows of no group
G, TOTAL = len(SIZES), sum(SIZES)


def assert_mlp(found, expected, dtype=jnp.float32):
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (dtype, y.shape)
        assert_diff_below(MLP[dtype], x, y)


@functools.cache
def random(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def problem(dtype=jnp.float32, m=M, d=D, f=F, g=G):
    """x (m, d), w_gate_up (g, d, 2 f), w_down (g, f, d), dout (m, d)."""
    weights = random(g, d, 2 * f, seed=1, scale=d**-0.5), random(g, f, d, seed=2, scale=f**-0.5)
    return tuple(x.astype(dtype) for x in (random(m, d), *weights, random(m, d, seed=3)))


def vjp(x, w_gate_up, w_down, dout, sizes, recipe, activation="silu"):
    """(out, dx, dw_gate_up, dw_down)."""
    mlp = lambda *args: moe_mlp(*args, sizes, recipe=recipe, activation=activation)
    out, pullback = jax.vjp(mlp, x, w_gate_up, w_down)
    return out, *pullback(dout)


_jitted_vjp = jax.jit(vjp, static_argnames=("recipe", "activation"))


def run(operands, sizes=SIZES, recipe=DEEPSEEK_V3, activation="silu"):
    """vjp of operands (x, w_gate_up, w_down, dout); compiled once for all sizes."""
    return _jitted_vjp(*operands, jnp.asarray(sizes, jnp.int32), recipe, activation)


def truth(operands, sizes=SIZES, **kwargs):
    """vjp of each group alone in float64, zero in rows of no group."""
    x, w_gate_up, w_down, dout = map(np.asarray, operands)
    results = [np.zeros(operand.shape) for operand in (x, x, w_gate_up, w_down)]
    for i, (start, end) in enumerate(reference.row_ranges(sizes, x.shape[0])):
        rows = slice(start, end)
        one = _mlp_vjp(x[rows], w_gate_up[i], w_down[i], dout[rows], **kwargs)
        results[0][rows], results[1][rows], results[2][i], results[3][i] = one
    return results


def _mlp_vjp(
    x,
    w_gate_up,
    w_down,
    dout,
    *,
    fwd=reference.E4M3,
    bwd=reference.E4M3,
    pow2=False,
    lhs_block=(1, 128),
    fp8=True,
    activation="silu",
):
    """(out, dx, dw_gate_up, dw_down) of one expert; without fp8 gate_up is not rounded either.

    lhs_block: the scale block of x and h in the gradients of weights.
    """
    kept = np.float32 if x.dtype == np.float16 else x.dtype
    if fp8:
        quantised = lambda x, fmt, **kw: reference.fake_quantize(x, fmt=fmt, pow2=pow2, **kw)
        rounded = lambda x: x.astype(kept).astype(np.float64)
    else:
        quantised = lambda x, fmt, block=None, axis=-1: (
            np.asarray(x, np.float64).T if axis == -2 else np.asarray(x, np.float64)
        )
        rounded = lambda x: x
    rows = lambda x, fmt: quantised(x, fmt)
    columns = lambda x, fmt: quantised(x, fmt, axis=-2)
    lhs_columns = lambda x: quantised(x.T, fwd, block=lhs_block)
    w_gate_up, w_down = (quantised(w, fwd, block=(128, 128)) for w in (w_gate_up, w_down))
    gate, up = np.split(rounded(rows(x, fwd) @ w_gate_up), 2, axis=1)
    h = gated_activations.gated(gate, up, activation)
    out = rows(h, fwd) @ w_down
    dh = rounded(rows(dout, bwd) @ w_down.T)
    da = np.concatenate(gated_activations.gated_grad(gate, up, dh, activation)[:2], axis=1)
    dx = rows(da, bwd) @ w_gate_up.T
    dw_gate_up = lhs_columns(x) @ columns(da, bwd).T
    return out, dx, dw_gate_up, lhs_columns(h) @ columns(dout, bwd).T
