"""How tests compare results, and the tolerances with their reasons.

Two measures. `assert_close` bounds each entry's error relative to the largest entry. `calc_diff` of
reference.py is about the energy of the error over that of the result: where FP8 rounds one value in
a thousand the other way, entries differ by much and the energy by little.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reference

from jax_fp8gemm import BF16, DEEPSEEK_V3

# Of an entry, relative to the largest entry, by the dtype of the result.

# A product of quantised operands against float64 on the same FP8 values: the f32 sum of up to 2^14
# terms; then the rounding to the dtype.
SCALED_PRODUCT = {jnp.float32: 2e-6, jnp.bfloat16: 2**-8}
# A differentiable product and its gradients against float64 on operands that the reference
# quantised: as above, where the gradients add two products.
PRODUCT = {jnp.float32: 3e-6, jnp.bfloat16: 2**-8, jnp.float16: 2**-10}

# Of calc_diff.

# The same program in another order of f32 sums: no FP8 value is rounded otherwise.
REORDERED = 1e-9
# Two quantised products in a row: what the first rounds otherwise by its f32 sums, the second
# quantises, which now and then moves an FP8 rounding, by 2^-4 of one value.
REQUANTIZED = 1e-6
# moe_mlp by the dtype of its operands: REQUANTIZED; in bf16, gate_up, dh and the results are
# rounded to bf16 between the products.
MLP = {jnp.float32: REQUANTIZED, jnp.float16: REQUANTIZED, jnp.bfloat16: 5e-6}
# moe_layer by its recipe: f32 sums alone; three products of values rounded to 2^-4 in a
# row, against float64 of the unquantised operands.
LAYER = {BF16: 1e-10, DEEPSEEK_V3: 5e-3}

# Of calc_diff, on a GPU: its tensor cores keep 14 bits of the sum of a block.

# A product against one of the operands before quantisation, and after; DeepGEMM's own bounds. The
# rounding of both operands to e4m3 alone is 7e-4 of the energy.
GPU_UNQUANTIZED, GPU_DEQUANTIZED = 1e-3, 1e-5
# A differentiable product against float64 on operands that the reference quantised: the rounding of
# the result's dtype (2^-9 or 2^-12 at worst, squared, over 3), and 1e-8 of truncation.
GPU_PRODUCT = {jnp.bfloat16: 1e-5, jnp.float16: 1e-7, jnp.float32: 1e-7}
# moe_mlp: now and then gate_up and dh round to the other bf16 neighbour, and with it FP8 values
# that follow. Measured on an H200: 1.4e-5.
GPU_MLP = 3e-5
# moe_layer against float32 of the unquantised operands: e4m3 keeps 4 bits, so an operand is off by
# 2.6 % (root mean square), in up to three products in a row; calc_diff is half the square of that.
GPU_LAYER = 4e-3


def assert_close(
    found: jax.Array,
    expected: np.ndarray,
    dtype: Any = jnp.float32,
    tolerances: Mapping[Any, float] = PRODUCT,
) -> None:
    """The dtype and the shape are those expected, each entry is within its tolerance."""
    assert found.dtype == dtype and found.shape == expected.shape
    bound = tolerances[dtype] * np.max(np.abs(expected), initial=0)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=bound)


def assert_all_close(
    found: Iterable[jax.Array],
    expected: Iterable[np.ndarray],
    dtype: Any = jnp.float32,
    tolerances: Mapping[Any, float] = PRODUCT,
) -> None:
    """`assert_close` of each pair."""
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, dtype, tolerances)


def assert_diff_below(bound: float, found: Any, expected: Any) -> None:
    """Each pair has one shape, and a calc_diff below `bound`. NaN never passes."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for x, y in zip(found, expected, strict=True):
        assert np.shape(x) == np.shape(y)
        assert reference.calc_diff(x, y) < bound


def assert_all_same_bits(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Each pair has one dtype, one shape and the same bits."""
    for x, y in zip(found, expected, strict=True):
        reference.assert_same_bits(x, y)


def assert_exact(found: jax.Array, expected: np.ndarray) -> None:
    """f32, equal, and every zero positive, as a sum that starts at 0 leaves it."""
    found = np.asarray(found)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    assert not np.any(np.signbit(found) & (found == 0))
