"""A small program that touches every kernel, for child processes: prints the hash of its results.

    python tests/gpu_program.py [--repeat N]

Repeated runs reuse addresses, so a recorded CUDA graph is replayed. Data come from NumPy.
"""

import argparse

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8gemm as jf


def _inputs() -> tuple[jax.Array, ...]:
    """lhs (m, k), rhs (k, n), dout (m, n): ragged, several tiles, k past the pipeline's ring."""
    rng = np.random.default_rng(0)
    shapes = ((200, 1160), (1160, 264), (200, 264))
    return tuple(jnp.asarray(rng.standard_normal(s, np.float32), jnp.bfloat16) for s in shapes)


def _program(lhs: jax.Array, rhs: jax.Array, dout: jax.Array) -> list[jax.Array]:
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
    inputs = _inputs()
    compiled = jax.jit(_program).lower(*inputs).compile()
    hashes = {gpu_cases.digest(*compiled(*inputs)) for _ in range(parser.parse_args().repeat)}
    print(*sorted(hashes))


if __name__ == "__main__":
    main()
