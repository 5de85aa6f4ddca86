"""A small program that touches every kernel, for child processes: prints hashes of its results.

    python tests/gpu_program.py [--repeat N]

One hash for each layout of the groups. Repeated runs reuse addresses, so a recorded CUDA graph is
replayed, each time on another layout than before. Data come from NumPy.
"""

import argparse

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8gemm as jf
from jax_fp8gemm.moe import moe_mlp

# Rows of the groups: with an empty one, all in one, fewer than there are, none.
LAYOUTS = ((100, 0, 27, 129, 1), (0, 0, 257, 0, 0), (64, 63, 65, 0, 7), (0, 0, 0, 0, 0))


def _normal(*shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(s, np.float32), jnp.bfloat16) for s in shapes)


def _inputs() -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """lhs (m, k), rhs (k, n), dout (m, n): ragged, several tiles, k past the pipeline's ring; and
    x (m, d), w_gate_up (g, d, 2 f), w_down (g, f, d) with an odd m."""
    dense = _normal((200, 1160), (1160, 264), (200, 264))
    return dense, _normal((257, 384), (5, 384, 400), (5, 200, 384))


def _program(dense, grouped, group_sizes: jax.Array) -> list[jax.Array]:
    return [*_dense_program(*dense), *_grouped_program(*grouped, group_sizes)]


def _grouped_program(x, w_gate_up, w_down, group_sizes) -> list[jax.Array]:
    """A grouped product and the layer, each with its gradients; the masked form."""
    how = dict(implementation=gpu_cases.IMPLEMENTATION)
    product = lambda x, w: jf.ragged_dot(x, w, group_sizes, **how)
    out, pullback = jax.vjp(product, x, w_gate_up)
    layer = lambda *xs: moe_mlp(*xs, group_sizes, **how)
    layer_out, layer_pullback = jax.vjp(layer, x, w_gate_up, w_down)
    rows = jf.quantize(jnp.broadcast_to(x[:60], (5, 60, 384)), **how)
    weights = jf.quantize(w_gate_up.mT, block=(128, 128), **how)
    masked = jf.scaled_ragged_dot(rows, weights, group_sizes, **how)
    return [out, *pullback(out), layer_out, *layer_pullback(layer_out), masked]


def _dense_program(lhs: jax.Array, rhs: jax.Array, dout: jax.Array) -> list[jax.Array]:
    """Forward and gradients, then a loop that accumulates into one buffer."""
    matmul = lambda x, y: jf.matmul(x, y, implementation=gpu_cases.IMPLEMENTATION)
    out, pullback = jax.vjp(matmul, lhs, rhs)
    quantize = lambda x, **how: jf.quantize(x, **how, implementation=gpu_cases.IMPLEMENTATION)
    lhs_q, rhs_q = quantize(lhs), quantize(rhs.T, block=(128, 128), with_transpose=True)

    def add(total, _):
        return gpu_cases.multiply(lhs_q, rhs_q, accum=total), None

    total, _ = jax.lax.scan(add, jnp.ones(out.shape, jnp.float32), length=5)
    columns = quantize(dout, axis=-2, dtype=jnp.float8_e5m2, pow2_scale=True)
    quantized = jax.tree.leaves((lhs_q, rhs_q, columns))
    return [out, *pullback(dout), total, *quantized]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=1)
    layouts = [jnp.asarray(sizes, jnp.int32) for sizes in LAYOUTS]
    inputs = _inputs()
    compiled = jax.jit(_program).lower(*inputs, layouts[0]).compile()
    hashes = {
        (i, gpu_cases.digest(*compiled(*inputs, sizes)))
        for _ in range(parser.parse_args().repeat)
        for i, sizes in enumerate(layouts)
    }
    print(*(text for _, text in sorted(hashes)))


if __name__ == "__main__":
    main()
