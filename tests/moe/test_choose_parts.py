"""The number of parts that moe_layer chooses, by sums by hand."""

import functools

import jax.numpy as jnp
import pytest

from jax_fp8gemm.moe._parallel.choose_parts import choose_parts, layer_seconds, part_seconds
from jax_fp8gemm.moe._parallel.exchange import make_exchange

D, F, TOP_K = 7168, 2048, 8  # of DeepSeek-V3


def chosen(name, size, tokens, experts, dtype=jnp.bfloat16, f=F):
    exchange = make_exchange(name, "x", size, tokens, TOP_K)
    return choose_parts(exchange, experts, D, f, dtype, fp8_combine=False)


def test_seconds_of_a_layer():
    there, back, products = 1.0, 2.0, 10.0
    assert layer_seconds(1, there, back, products) == 3 + 10 + 1 + 20
    # Of two parts half of the way there twice, and half of the way back, are not hidden.
    assert layer_seconds(2, there, back, products) == 1.5 + 10 + 0.5 + 20
    # Where nothing is long enough to hide them: (there + back) / 2 twice, and half the products.
    assert layer_seconds(2, there, back, 1.0) == 1.5 + (1.5 + 0.5) + 0.5 + (0.5 + 2 + 0.5)


def test_seconds_of_parts():
    assert part_seconds(1, 10**9, 2) == 0
    # f32 gradients are added once for each further part, and rounded once unless weights are f32.
    assert part_seconds(2, 10**9, 2) == pytest.approx(1.8e-3 + 0.22e-3 + 1.5e-3)
    assert part_seconds(4, 10**9, 4) == pytest.approx(3 * (1.8e-3 + 0.22e-3))


@pytest.mark.parametrize(
    "arguments, expected",
    [
        # 0.65 ms there and 1.3 back. Two parts hide 1.3 of them, and cost 3.0.
        (("all_gather", 4, 8192, 16), 1),
        # 2.0 and 3.9; two parts hide 3.8 for 2.1, and four 5.7 for 5.8.
        (("all_to_all", 64, 8192, 4), 2),
        # A part takes longer than all tokens.
        (("all_to_all", 64, 128, 4), 1),
        (("all_gather", 1, 8192, 16), 1),
        # Weights without a gradient cost nothing, and still 1.3 is less than 1.8.
        (("all_gather", 4, 8192, 0), 1),
    ],
)
def test_chosen_number(arguments, expected):
    assert chosen(*arguments) == expected


def test_weights_in_f32_need_no_rounding():
    call = functools.partial(chosen, "all_to_all", 64, 8192, 32)
    assert (call(), call(dtype=jnp.float32)) == (1, 2)
