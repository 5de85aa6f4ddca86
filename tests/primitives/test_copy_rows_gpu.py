"""copy_rows on a GPU: every bit of the rows that are named, against NumPy."""

import copy_rows_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import E4M3, E5M2, assert_same_bits

from jax_fp8gemm import ScaledArray
from jax_fp8gemm._primitives.copy_rows import copy_rows

pytestmark = pytest.mark.gpu


def check(s, copies, m, k, fmt=E4M3, **how):
    *operands, is_named = copy_rows_cases.problem(s, copies, m, k, fmt, **how)
    found = copy_rows_cases.run(*operands, m, "cuda")
    copy_rows_cases.check(found, *operands, is_named)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
# Whole scale blocks and parts of one; words of 16 bytes and of 1; pieces of 2048, more and less.
@pytest.mark.parametrize("k", [1, 15, 16, 127, 128, 144, 2032, 2047, 2048, 2049, 2064, 2880, 7168])
def test_bits(k, fmt):
    check(77, 3, 300, k, fmt)


# A warp reads 32 places at a time.
@pytest.mark.parametrize("copies", [1, 2, 8, 31, 32, 33, 64, 100])
def test_bits_of_any_number_of_copies(copies):
    check(50, copies, 40 * copies, 1152, share=0.9)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_no_place_few_places_or_all_name_a_row(share):
    check(1000, 8, 8000, 256, share=share)


@pytest.mark.parametrize("s, m", [(1, 1), (1, 5), (3, 1), (20_001, 7)])
def test_few_rows(s, m):
    check(s, 2, m, 2048)


@pytest.mark.parametrize("k", [7168, 7160])
def test_real_sizes(k):
    """DeepSeek-V3's tokens on one of two GPUs. CTAs are more than an H100 holds at once."""
    check(16384, 8, 81920, k, share=0.5)


def test_results_repeat_and_are_the_references():
    *operands, is_named = copy_rows_cases.problem(4096, 8, 20_000, 7168, E4M3, share=0.5)
    first, *others = (
        copy_rows_cases.run(*operands, 20_000, how) for how in ("cuda", "cuda", "xla")
    )
    for other in others:
        for x, y in ((first.values, other.values), (first.scale, other.scale)):
            assert_same_bits(np.asarray(x)[is_named], np.asarray(y)[is_named])


def test_rows_past_2_31_bytes():
    """Offsets are 64 bits: the last rows of a result of more than 4 GB."""
    s, k, m = 64, 7168, 620_000
    values, scale, _, _ = copy_rows_cases.problem(s, 1, 1, k, E4M3)
    places = np.arange(m - s, m, dtype=np.int32)[:, None]
    found = copy_rows_cases.run(values, scale, places, m, "cuda")
    last = slice(m - s, m)
    assert_same_bits(np.asarray(found.values[last]), values)
    assert_same_bits(np.asarray(found.scale[last]), scale)


def test_in_a_loop_and_beside_other_work():
    """In a CUDA graph, if XLA makes one of the loop."""
    *operands, is_named = copy_rows_cases.problem(300, 3, 700, 512, E4M3)
    values, scale, places = map(jnp.asarray, operands)

    @jax.jit
    def run(values, scale, places):
        def step(i, state):
            rows = copy_rows(ScaledArray(values, scale), places, 700, implementation="cuda")
            return rows.values.view(jnp.uint8), rows.scale

        start = jnp.zeros((700, 512), jnp.uint8), jnp.zeros((700, 4), jnp.float32)
        return jax.lax.fori_loop(0, 3, step, start)

    found, scales = run(values, scale, places)
    copy_rows_cases.check(ScaledArray(found.view(E4M3), scales), *operands, is_named)


def test_kernel_is_used():
    *operands, _ = copy_rows_cases.problem(8, 2, 16, 128, E4M3)
    run = lambda *xs: copy_rows_cases.run(*xs, 16)
    text = jax.jit(run).lower(*operands).as_text()
    assert text.count("custom_call @jax_fp8gemm_copy_rows") == 1
