"""scaled_ragged_dot's expected_rows: tiles are chosen for it, and no bit depends on it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, without_annotation_checks
from grouped_cases import int32, normal
from reference import assert_same_bits

from jax_fp8gemm import explain, quantize, scaled_ragged_dot

SIZES = int32((8, 3, 0, 9))


def operands(max_m=1024, groups=4, n=1536, k=512):
    lhs, rhs = normal(groups, max_m, k), normal(groups, n, k, seed=1)
    return quantize(lhs), quantize(rhs, block=(128, 128))


def config_of(text):
    """What a lowered program says to the launch code."""
    return re.search(r"config = \{(.*?)\}", text)[1]


def lowered_config(lhs, rhs, expected_rows):
    dot = jax.jit(functools.partial(scaled_ragged_dot, expected_rows=expected_rows))
    return config_of(dot.trace(lhs, rhs, SIZES).lower(lowering_platforms=("cuda",)).as_text())


def test_tiles_are_chosen_for_them():
    of = functools.partial(lowered_config, *operands())
    assert of(None) == of(1024) == of(5000)
    assert "block_m = 64 " in of(8) and "block_m = 64 " not in of(None)
    with without_annotation_checks():
        assert of(np.int64(8)) == of(8)


def test_explain_counts_them():
    lhs, rhs = operands()
    run = functools.partial(scaled_ragged_dot, lhs, rhs, SIZES)
    few, all_rows = explain(lambda: run(expected_rows=8)), explain(run)
    assert few.flop == 2 * 4 * 8 * 1536 * 512 and all_rows.flop == 128 * few.flop
    assert few.time_us < all_rows.time_us


def test_no_bit_depends_on_them():
    lhs, rhs = operands(9, 3, 24, 140)
    sizes = int32(((4, 0, 9), (9, 9, 1)))
    of_each = lambda **how: jax.jit(jax.vmap(functools.partial(scaled_ragged_dot, lhs, rhs, **how)))
    assert_same_bits(of_each(expected_rows=2)(sizes), of_each()(sizes))
    one = scaled_ragged_dot(lhs, rhs, sizes[0], implementation="emulate", expected_rows=2)
    assert_same_bits(one, scaled_ragged_dot(lhs, rhs, sizes[0], implementation="emulate"))


@pytest.mark.parametrize("given, said", [(0, "0"), (-1, "-1"), (2.0, "2.0")])
def test_wrong_expected_rows(given, said):
    lhs, rhs = operands(9, 3, 24, 140)
    message = f"^scaled_ragged_dot: expected_rows must be None or an integer .*; got {said}$"
    with raises(ValueError, match=message):
        scaled_ragged_dot(lhs, rhs, SIZES[:3], expected_rows=given)


def test_a_traced_number():
    lhs, rhs = operands(9, 3, 24, 140)
    with raises(ValueError, match="of at least 1, known when the call is traced; got "):
        jax.jit(lambda n: scaled_ragged_dot(lhs, rhs, SIZES[:3], expected_rows=n))(3)


def test_groups_that_follow_each_other_have_none():
    lhs, rhs = operands(9, 3, 24, 140)
    rows = quantize(jnp.ones((9, 140), jnp.bfloat16))
    with raises(ValueError, match=r"expected_rows must go with lhs \(g, max_m, k\); got lhs"):
        scaled_ragged_dot(rows, rhs, SIZES[:3], expected_rows=3)
