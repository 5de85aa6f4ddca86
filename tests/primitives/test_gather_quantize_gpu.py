"""gather_quantize on a GPU: every bit against NumPy, and at real sizes against the reference."""

import gather_cases
import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_cases import DTYPES, E4M3, E5M2, FP8
from test_grouped_gpu import SIZES

pytestmark = pytest.mark.gpu

FIRST_ROW = 5
SIZES_EDGES = SIZES["edges"]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
weights_or_not = pytest.mark.parametrize("is_weighted", (False, True), ids=("plain", "weighted"))


def _modes(dtype):
    return ("block_transposed", "column") if dtype in FP8 else ("row", "column", "row_column")


# Whole blocks, parts of one (208: a multiple of 16, as aligned rows of FP8 are), unaligned rows.
@pytest.mark.parametrize("k", [128, 200, 208, 257, 2880])
@weights_or_not
@dtypes
def test_bits(dtype, is_weighted, k):
    x, rows, weights = gather_cases.problem(dtype, 77, k, 1003)
    weights = weights if is_weighted else None
    for mode in _modes(dtype):
        for fmt, pow2 in ((E4M3, False), (E5M2, True)):
            gather_cases.check(x, rows, weights, SIZES_EDGES, FIRST_ROW, mode, fmt, pow2)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bits_of_any_groups(sizes):
    x, rows, weights = gather_cases.problem(jnp.bfloat16, 77, 200, 1003)
    gather_cases.check(x, rows, weights, sizes, 0, "row_column", E4M3)


@weights_or_not
@dtypes
def test_real_sizes_equal_the_reference_lowering(dtype, is_weighted):
    """DeepSeek-V3's rows; the reference lowering is itself held to NumPy below."""
    x, rows, weights = gather_cases.problem(dtype, 512, 7168, 4096)
    sizes = np.random.default_rng(1).multinomial(4000, np.full(16, 1 / 16))
    weights = weights if is_weighted else None
    (*_, mode) = _modes(dtype)
    run = lambda how: gather_cases.run(x, rows, weights, sizes, 0, mode, E4M3, False, how)
    for found, expected in zip(*map(jax.tree.leaves, (run(None), run("xla"))), strict=True):
        gpu_cases.assert_same(found, expected)


# On 132 multiprocessors a CTA takes 2 tiles, 18 in runs of 2 k-blocks, 35 and 34 in runs of 4. The
# last k-block has 16 columns, 128, 112 and 16; the last run of a row of tiles may be a shorter one.
@pytest.mark.parametrize("k, m", [(656, 9000), (7168, 10_000), (7152, 20_000), (656, 190_000)])
@weights_or_not
@pytest.mark.parametrize("mode", ["column", "block_transposed"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_several_fp8_tiles_of_a_cta(dtype, mode, is_weighted, k, m):
    """Groups of 0 and 1 rows among others, and rows of none: whole blocks of columns are zeros."""
    x, rows, weights = gather_cases.problem(dtype, 999, k, m)
    sizes = (0, 1, m // 3, 0, 129, 1, 128, m // 2 - 300, 0)
    weights = weights if is_weighted else None
    run = lambda how: gather_cases.run(x, rows, weights, sizes, 7, mode, E4M3, False, how)
    for found, expected in zip(*map(jax.tree.leaves, (run(None), run("xla"))), strict=True):
        gpu_cases.assert_same(found, expected)


@weights_or_not
@dtypes
def test_reference_lowering_on_the_gpu(dtype, is_weighted):
    x, rows, weights = gather_cases.problem(dtype, 50, 200, 300)
    weights = weights if is_weighted else None
    (*_, mode) = _modes(dtype)
    gather_cases.check(x, rows, weights, (100, 0, 150), 5, mode, E4M3, False, "xla")


def test_kernel_is_used():
    x, rows, _ = gather_cases.problem(jnp.bfloat16, 4, 128, 8)
    run = lambda x: gather_cases.run(x, rows, None, (8,), 0, "row", E4M3)
    assert jax.jit(run).lower(x).as_text().count("custom_call @jax_fp8gemm_gather_quantize") == 1
