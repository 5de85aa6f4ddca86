"""sum_rows on a GPU: every bit, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sum_rows_cases
from reference import assert_same_bits

from jax_fp8gemm._primitives.sum_rows import sum_rows

pytestmark = pytest.mark.gpu

BF16, F16, F32 = map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32))


def check(m, k, s, c, dtype=BF16, **how):
    operands = sum_rows_cases.problem(m, k, s, c, dtype, **how)
    found = sum_rows_cases.run(*operands, "cuda")
    assert_same_bits(found, sum_rows_cases.expected(*operands))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
# Words of 16 bytes and of an element; pieces of 2048 bytes, more and less.
@pytest.mark.parametrize("k", [1, 7, 8, 16, 500, 512, 1016, 1020, 1023, 1024, 1025, 1032, 7168])
def test_bits(k, dtype):
    check(300, k, 77, 3, dtype)


# A warp reads 32 places at a time, and two rows.
@pytest.mark.parametrize("c", [1, 2, 7, 8, 31, 32, 33, 64, 100])
def test_bits_of_any_number_of_places(c):
    check(500, 1152, 50, c, share=0.9)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_no_place_few_places_or_all_are_rows(share):
    check(8000, 256, 1000, 8, share=share)


@pytest.mark.parametrize("m, s", [(1, 1), (5, 1), (1, 3), (7, 20_001)])
def test_few_rows(m, s):
    check(m, 2048, s, 2)


@pytest.mark.parametrize("k", [7168, 7164])
def test_real_sizes(k):
    """DeepSeek-V3's tokens on one of four GPUs, a quarter of them. CTAs outnumber their places."""
    check(20480, k, 8192, 8, share=0.25)


def test_products_are_rounded_and_sums_are_not_fused():
    """By XLA as by the kernel, so that the layer keeps its bits."""
    operands = sum_rows_cases.problem(8000, 1024, 4096, 8, BF16, share=0.5)
    first, *others = (sum_rows_cases.run(*operands, how) for how in ("cuda", "cuda", "xla"))
    for other in others:
        assert_same_bits(first, other)


def test_rows_past_2_31_bytes():
    """Offsets are 64 bits: the last rows of more than 4 GB."""
    m, k, s = 310_000, 7168, 64
    rows = jnp.zeros((m, k), BF16).at[m - s :].set(jnp.arange(s, dtype=BF16)[:, None])
    places = np.arange(m - s, m, dtype=np.int32)[:, None]
    found = sum_rows_cases.run(rows, places, np.ones((s, 1), np.float32), "cuda")
    assert_same_bits(found, np.asarray(rows[m - s :]))


def test_in_a_loop_and_beside_other_work():
    """In a CUDA graph, if XLA makes one of the loop."""
    rows, places, weights = operands = sum_rows_cases.problem(700, 512, 300, 3, F32)

    @jax.jit
    def run(rows, places, weights):
        step = lambda i, _: sum_rows(rows, places, weights, implementation="cuda")
        return jax.lax.fori_loop(0, 3, step, jnp.zeros((300, 512), jnp.float32))

    assert_same_bits(run(rows, places, weights), sum_rows_cases.expected(*operands))


def test_kernel_is_used():
    operands = sum_rows_cases.problem(16, 128, 8, 2, BF16)
    text = jax.jit(sum_rows_cases.run).lower(*operands).as_text()
    assert text.count("custom_call @jax_fp8gemm_sum_rows") == 1
