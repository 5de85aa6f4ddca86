"""Runs an op on operands that end where mapped memory ends, of shapes drawn at random.

    python tests/guarded_program.py OP [--count N] [--past-end OPERAND]

Prints how many calls had the bits of a call on ordinary memory. --past-end: the operand of this
number claims more than is mapped, in one call that must fault.
"""

import argparse
from collections.abc import Callable

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
from guarded_memory import GuardedMemory
from jax import lax

import jax_fp8gemm as jf
from jax_fp8gemm._primitives.gemm import gemm

_OPERAND_BYTES = 8 << 20  # Of an operand, at most.
_ROWS, _SQUARE = gpu_cases.ROWS, gpu_cases.SQUARE
_HOW = dict(implementation=gpu_cases.IMPLEMENTATION)

# A function of arrays, and these arrays. FP8 and bf16 arrays are integers here, for NumPy's array
# interface has neither. Scales of rows are stored as the kernels read them: a row for each k-block.
Case = tuple[Callable, list[np.ndarray]]


def _fp8(rng, *shape: int) -> np.ndarray:
    """Bits of finite E4M3."""
    return rng.integers(0, 0x7F, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7


def _scales(rng, *shape: int) -> np.ndarray:
    return rng.uniform(0.5, 2, shape).astype(np.float32)


def _blocks(extent: int) -> int:
    return -(-extent // 128)


def _of_rows(values: jax.Array, scale: jax.Array) -> jf.ScaledArray:
    return jf.ScaledArray(_as_fp8(values), scale.mT, block=_ROWS)


def _of_squares(values: jax.Array, scale: jax.Array) -> jf.ScaledArray:
    return jf.ScaledArray(_as_fp8(values), scale, block=_SQUARE)


def _as_fp8(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, gpu_cases.E4M3)


def _extents(rng) -> tuple[int, int, int]:
    """m up to 2048, n and k up to 2048 and 4096 in steps of 8 and 16; small ones are frequent."""
    m, n, k = (int(2 ** rng.uniform(0, top)) for top in (11, 8, 8))
    return m, 8 * n, 16 * k


def _rows_by_squares(rng) -> Case:
    m, n, k = _extents(rng)
    kept_k = k if rng.integers(2) else _blocks(k) * 128  # rhs may be padded
    rhs = np.pad(_fp8(rng, n, k), ((0, 0), (0, kept_k - k)))
    scales = _scales(rng, _blocks(k), m), _scales(rng, _blocks(n), _blocks(k))
    split_k = bool(rng.integers(2))
    run = lambda x, x_scale, w, w_scale: gemm(
        _of_rows(x, x_scale), _of_squares(w, w_scale), jnp.bfloat16, split_k=split_k, **_HOW
    )
    return run, [_fp8(rng, m, k), scales[0], rhs, scales[1]]


def _rows_by_rows(rng) -> Case:
    m, n, k = _extents(rng)
    run = lambda x, x_scale, y, y_scale: gpu_cases.multiply(
        _of_rows(x, x_scale), _of_rows(y, y_scale)
    )
    scales = [_scales(rng, _blocks(k), rows) for rows in (m, n)]
    return run, [_fp8(rng, m, k), scales[0], _fp8(rng, n, k), scales[1]]


def _groups_of_rows(rng) -> Case:
    g, n, k = (int(rng.integers(1, top)) for top in (9, 64, 48))
    n, k = 8 * n, 16 * k
    sizes = rng.integers(0, int(2 ** rng.uniform(1, 9)), g).astype(np.int32)
    m = int(sizes.sum() + rng.integers(1, 50))  # the last rows are of no group
    run = lambda x, x_scale, w, w_scale, sizes: jf.scaled_ragged_dot(
        _of_rows(x, x_scale), _of_squares(w, w_scale), sizes, **_HOW
    )
    scales = _scales(rng, _blocks(k), m), _scales(rng, g, _blocks(n), _blocks(k))
    return run, [_fp8(rng, m, k), scales[0], _fp8(rng, g, n, k), scales[1], sizes]


def _quantised_in_the_product(rng) -> Case:
    """Few rows of bf16, which the product quantises."""
    m, n, k = (
        int(rng.integers(1, 17)),
        8 * int(rng.integers(1, 256)),
        16 * int(rng.integers(1, 256)),
    )
    run = lambda x, w, w_scale: jf.matmul(
        lax.bitcast_convert_type(x, jnp.bfloat16),
        jf.ScaledArray(None, w_scale, _as_fp8(w), block=_SQUARE),
        **_HOW,
    )
    x = np.asarray(jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)).view(np.uint16)
    return run, [x, _fp8(rng, n, k), _scales(rng, _blocks(n), _blocks(k))]


def _quantize(rng) -> Case:
    m, k = (int(2 ** rng.uniform(0, 10)) for _ in range(2))
    dtype = (np.float32, np.float16)[rng.integers(2)]
    block = (_ROWS, _SQUARE)[rng.integers(2)]

    def run(x):
        out = jf.quantize(x, block=block, **_HOW)
        # Scales of rows are stored with a row for each k-block.
        return out.values, out.scale.mT if block == _ROWS else out.scale

    return run, [rng.standard_normal((m, k)).astype(dtype)]


OPS = {
    "rows_by_squares": _rows_by_squares,
    "rows_by_rows": _rows_by_rows,
    "groups_of_rows": _groups_of_rows,
    "quantised_in_the_product": _quantised_in_the_product,
    "quantize": _quantize,
}


def _compile(run: Callable, operands: list[jax.Array]) -> Callable:
    """The program, which must read the operands where they lie."""
    compiled = jax.jit(run).lower(*operands).compile()
    text = compiled.as_text() or ""
    assert not any(word in text for word in (" copy(", " transpose(", " fusion(")), text
    return compiled


def _past_end(case: Case, operand: int) -> None:
    run, arrays = case
    memory = [GuardedMemory(_OPERAND_BYTES) for _ in arrays]
    # Half of the operand is mapped.
    mapped = [a.reshape(-1)[: a.size // 2] if i == operand else a for i, a in enumerate(arrays)]
    placed = [m.place(x, a.shape) for m, x, a in zip(memory, mapped, arrays, strict=True)]
    jax.block_until_ready(_compile(run, placed)(*placed))
    print("no fault")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--past-end", type=int)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    if options.past_end is not None:
        return _past_end(OPS[options.op](rng), options.past_end)
    memory = [GuardedMemory(_OPERAND_BYTES) for _ in range(5)]
    num_same = 0
    for _ in range(options.count):
        run, arrays = OPS[options.op](rng)
        placed = [m.place(x) for m, x in zip(memory, arrays, strict=False)]
        compiled = _compile(run, placed)
        results = [gpu_cases.digest(*jax.tree.leaves(compiled(*p))) for p in (placed, arrays)]
        assert results[0] == results[1], [a.shape for a in arrays]
        num_same += 1
    print(num_same)


if __name__ == "__main__":
    main()
