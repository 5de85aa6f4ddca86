"""The rows that a device computes in each turn, against a loop over the choices."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8gemm._data.groups import row_ranges
from jax_fp8gemm.moe._choices import sort_choices
from jax_fp8gemm.moe._parallel.rows import Received, rows_of_turn

# Of three local experts, 0 to 2: 7 of 12 choices.
INDICES = np.array([[2, 5], [-1, 0], [2, 2], [0, 3], [4, -2], [2, 0]], np.int32)


@pytest.mark.parametrize("num_rows", [2, 3, 5, 12])
def test_each_choice_has_one_row_and_others_copy_the_first_token(num_rows):
    choices = sort_choices(jnp.asarray(INDICES), 3)
    received = Received(None, jnp.ones(INDICES.shape), *choices)
    seen = np.zeros(INDICES.shape, int)
    for turn in range(-(-7 // num_rows)):
        rows = rows_of_turn(received, turn, num_rows)
        ranges = np.stack(row_ranges(*rows.groups, num_rows), axis=1)
        expert = np.full(num_rows, -1)
        for i, (start, end) in enumerate(ranges):
            expert[start:end] = i
        token = np.asarray(rows.token)
        np.testing.assert_array_equal(token[expert < 0], 0)
        for choice in zip(*np.nonzero(np.asarray(rows.has_row)), strict=True):
            row = int(rows.order[choice])
            assert (token[row], expert[row]) == (choice[0], INDICES[choice])
            seen[choice] += 1
    np.testing.assert_array_equal(seen, (INDICES >= 0) & (INDICES < 3))
