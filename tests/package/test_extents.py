"""Extents that int32 cannot number are refused before XLA sees them. Nothing is allocated here."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from errors import raises

import jax_fp8gemm as fp8
from jax_fp8gemm import moe

LIMIT = 2**31


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


int32 = partial(struct, dtype=jnp.int32)


def quantised(*shape):
    """With 1x128 blocks."""
    scale = struct(*shape[:-1], -(-shape[-1] // 128), dtype=jnp.float32)
    return fp8.ScaledArray(struct(*shape, dtype=jnp.float8_e4m3fn), scale)


SQUARES = fp8.ScaledArray(
    struct(2, 8, 8, dtype=jnp.float8_e4m3fn), struct(2, 1, 1, dtype=jnp.float32), None, (128, 128)
)
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
BATCHES = (((2,), (1,)), ((0,), (0,)))
EXPERTS = struct(2, 8, 16), struct(2, 8, 8)


# m: an extent that is one too large where the others are those below.
def cases(m):
    yield "matmul", fp8.matmul, struct(m, 8, 8), struct(m, 8, 8)
    yield "dot_general", partial(fp8.dot_general, dimension_numbers=BATCHES), *[struct(m, 8, 8)] * 2
    # 127 columns more for each of two groups.
    rows = m - 254
    for options in (
        {},
        dict(recipe=fp8.BF16),
        dict(precision="highest"),
        dict(implementation="xla"),
    ):
        ragged_dot = partial(fp8.ragged_dot, **options)
        yield "ragged_dot", ragged_dot, struct(rows, 8), struct(2, 8, 8), int32(2)
        numbers = dict(ragged_dot_dimension_numbers=OVER_ROWS)
        contraction = partial(fp8.ragged_dot_general, **numbers, **options)
        yield "ragged_dot_general", contraction, struct(rows, 8), struct(rows, 8), int32(2)
    yield "quantize_ragged", fp8.quantize_ragged, struct(rows, 8), int32(2)
    yield "scaled_ragged_dot", fp8.scaled_ragged_dot, quantised(rows, 8), SQUARES, int32(2)
    yield "scaled_ragged_dot", fp8.scaled_ragged_dot, quantised(2, rows, 8), SQUARES, int32(2)
    columns = quantised(8, m // 128 * 128)
    yield "scaled_ragged_wgrad", fp8.scaled_ragged_wgrad, columns, columns, int32(2)
    yield "moe_mlp", moe.moe_mlp, struct(rows, 8), *EXPERTS, int32(2)
    permute = partial(moe.permute, num_experts=2)
    yield "permute", permute, struct(m, 8), int32(m, 1)
    yield "permute", partial(moe.permute, num_experts=m), struct(4, 8), int32(4, 2)
    yield "unpermute", moe.unpermute, struct(m, 8), int32(m, 1), struct(m, 1)
    yield "route", partial(moe.route, top_k=2), struct(4, m)
    layer = partial(moe.moe_layer, top_k=1)
    yield "moe_layer", layer, struct(rows, 8), struct(rows, 2), *EXPERTS


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("i", range(len(list(cases(LIMIT)))))
def test_extents_that_int32_cannot_number(i, x64):
    op, function, *args = list(cases(LIMIT))[i]
    with (
        jax.enable_x64(x64),
        raises(ValueError, match=rf"^{op}: .* must be below 2\^31; got \d+, "),
    ):
        jax.eval_shape(function, *args)


@pytest.mark.parametrize("i", range(len(list(cases(LIMIT)))))
def test_the_largest_extents_are_taken(i):
    _, function, *args = list(cases(LIMIT - 1))[i]
    jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",))


@pytest.mark.parametrize("m, top_k", [(0, LIMIT), (1, 1025)])
def test_choices_of_a_token_that_a_program_cannot_add_up(m, top_k):
    x, choices, weights = struct(m, 8), int32(m, top_k), struct(m, top_k)
    calls = {
        "permute": (partial(moe.permute, num_experts=2), x, choices),
        "unpermute": (moe.unpermute, struct(m * top_k, 8), choices, weights),
        "moe_layer": (moe.moe_layer, x, (choices, weights), *EXPERTS),
    }
    for op, (function, *args) in calls.items():
        with raises(ValueError, match=rf"^{op}: top_k must be at most 1024; got {top_k}, "):
            jax.eval_shape(function, *args)


def test_experts_past_any_integer():
    with raises(ValueError, match=r"permute: num_experts must be below 2\^31; got 10{30}, s32"):
        moe.permute(jnp.ones((4, 8)), jnp.zeros((4, 2), jnp.int32), 10**30)
