"""Arrays of more than 2^31 elements: their last rows have the bits that they have alone.

    python tests/large_program.py CASE

In a process of its own, whose memory is free again when it ends: up to 30 GB.
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import gpu_cases
import jax
import jax.numpy as jnp

import jax_fp8gemm as jf
from jax_fp8gemm._primitives.sum_rows import sum_rows
from jax_fp8gemm.moe import moe_mlp

ROWS, K = 2344 * 128, 7168
TAIL = 256  # rows, in whole scale blocks
SIDE = 364 * 128
GROUPS, GROUP_ROWS, GROUP_N, GROUP_SIDE = 64, 16, 37 * 128, 46 * 128
assert min(ROWS * K, SIDE**2, GROUPS * GROUP_N * K, GROUPS * GROUP_SIDE**2) > 2**31

HOW: Any = dict(implementation=gpu_cases.IMPLEMENTATION)
quantize = functools.partial(jf.quantize, **HOW)
quantize_blocks = functools.partial(quantize, block=gpu_cases.SQUARE)
scaled_matmul = functools.partial(jf.scaled_matmul, **HOW)


def distinct_rows(m: int, k: int) -> jax.Array:
    """bf16 rows (m, k), of which blocks of TAIL that lie far apart differ."""
    block = jax.random.normal(jax.random.key(m), (TAIL, k), jnp.bfloat16)
    factors = jnp.linspace(0.5, 2.0, -(-m // TAIL)).astype(jnp.bfloat16)
    return (block * factors[:, None, None]).reshape(-1, k)[:m]


def last(x: jf.ScaledArray, rows: int) -> jf.ScaledArray:
    """The last rows, in whole scale blocks."""
    return jf.ScaledArray(x.values[-rows:], x.scale[-(rows // x.block[0]) :], block=x.block)


def quantisation() -> Iterator[tuple[Any, Any]]:
    x = distinct_rows(ROWS, K)
    both = functools.partial(jf.quantize_both, **HOW)
    columns = functools.partial(quantize, axis=-2)
    for run in (quantize, columns, both, functools.partial(quantize_blocks, with_transpose=True)):
        yield run(x), run(x[-TAIL:])


def products() -> Iterator[tuple[Any, Any]]:
    """A long lhs and result, then a long rhs."""
    x, weights = distinct_rows(ROWS, K), quantize_blocks(distinct_rows(K, K))
    long = quantize(x)
    yield scaled_matmul(long, weights), scaled_matmul(last(long, TAIL), weights)
    long, rows = quantize_blocks(x), quantize(x[:TAIL])
    yield scaled_matmul(rows, long), scaled_matmul(rows, last(long, TAIL))


def weight_gradients() -> Iterator[tuple[Any, Any]]:
    lhs = quantize(distinct_rows(SIDE, 2 * TAIL))
    tail, run = last(lhs, TAIL), functools.partial(scaled_matmul, out_dtype=jnp.float32)
    yield run(lhs, lhs), run(tail, tail)
    ones = functools.partial(jnp.ones, dtype=jnp.float32)
    run = jax.jit(lambda x, ones: scaled_matmul(x, x, out_dtype=jnp.float32, accumulate_into=ones))
    yield run(lhs, ones((SIDE, SIDE))), run(tail, ones((TAIL, TAIL)))


def experts() -> Iterator[tuple[Any, Any]]:
    """Long weights, in both forms; then their gradients."""
    weights = quantize_blocks(distinct_rows(GROUPS * GROUP_N, K).reshape(GROUPS, GROUP_N, K))
    rows = quantize(distinct_rows(GROUPS * GROUP_ROWS, K))
    sizes = jnp.full(GROUPS, GROUP_ROWS, jnp.int32)
    of_last = jf.ScaledArray(weights.values[-1], weights.scale[-1], block=weights.block)
    alone = scaled_matmul(last(rows, GROUP_ROWS), of_last)
    yield jf.scaled_ragged_dot(rows, weights, sizes, **HOW), alone
    masked = jax.tree.map(lambda x: x.reshape(GROUPS, GROUP_ROWS, -1), rows)
    yield jf.scaled_ragged_dot(masked, weights, sizes, **HOW)[-1], alone

    sizes = jnp.full(GROUPS, gpu_cases.SQUARE[0], jnp.int32)
    x = distinct_rows(int(sizes.sum()), GROUP_SIDE)
    columns = jf.quantize_ragged(x, sizes, **HOW)
    of_last = quantize(x[-gpu_cases.SQUARE[0] :], axis=-2)
    alone = scaled_matmul(of_last, of_last, out_dtype=jnp.float32)
    yield jf.scaled_ragged_wgrad(columns, columns, sizes, **HOW)[-1], alone


def layer() -> Iterator[tuple[Any, Any]]:
    """moe_mlp forward and backward, with a long gate_up."""
    hidden = 512
    x = distinct_rows(ROWS, hidden)
    up = distinct_rows(2 * hidden, K).reshape(2, hidden, K)
    down = distinct_rows(K, hidden).reshape(2, K // 2, hidden)

    @jax.jit
    def run(x, up, down, sizes):
        out, pullback = jax.vjp(lambda *xs: moe_mlp(*xs, sizes, **HOW), x, up, down)
        return out, *pullback(out)

    whole = run(x, up, down, jnp.array([ROWS - TAIL, TAIL], jnp.int32))
    yield whole, run(x[-TAIL:], up[1:], down[1:], jnp.array([TAIL], jnp.int32))


def sums_of_wide_rows() -> Iterator[tuple[Any, Any]]:
    """A row of 2^31 bytes, twice, by sum_rows."""
    tail = jax.random.normal(jax.random.key(0), (1, TAIL))
    places, weights = jnp.zeros((2, 1), jnp.int32), jnp.array([[1.0], [2.0]])
    run = functools.partial(sum_rows, places=places, weights=weights, **HOW)
    yield run(jnp.tile(tail, 2**29 // TAIL)), run(tail)


FUNCTIONS = quantisation, products, weight_gradients, experts, layer, sums_of_wide_rows
CASES = {f.__name__: f for f in FUNCTIONS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    for whole, alone in CASES[parser.parse_args().case]():
        for long, short in zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True):
            tail = long[tuple(slice(-extent, None) for extent in short.shape)]
            gpu_cases.assert_same(tail, short, f"{long.shape}")


if __name__ == "__main__":
    main()
