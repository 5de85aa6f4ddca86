"""moe_mlp against the fake-quantised MLP and gradients of each group alone, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED
from errors import raises
from moe_cases import SIZES, TOTAL, G, M, assert_mlp, problem, run, truth

from jax_fp8gemm import BF16, DEEPSEEK_V3, Recipe, quantize
from jax_fp8gemm.moe import moe_mlp

HYBRID_POW2 = Recipe(bwd="e5m2", pow2_scale=True)
SQUARE_LHS = Recipe(wgrad_lhs_block=(128, 128))


@pytest.mark.parametrize(
    "recipe, kwargs, x_dtype, w_dtype",
    [
        (DEEPSEEK_V3, {}, jnp.bfloat16, jnp.bfloat16),
        (DEEPSEEK_V3, {}, jnp.float32, jnp.float32),
        (HYBRID_POW2, dict(bwd=reference.E5M2, pow2=True), jnp.float16, jnp.float32),
        (SQUARE_LHS, dict(lhs_block=(128, 128)), jnp.float32, jnp.float32),
    ],
)
def test_value_and_gradients_are_those_of_the_fake_quantised_experts(
    recipe, kwargs, x_dtype, w_dtype
):
    x, *weights, dout = problem()
    operands = x.astype(x_dtype), *(w.astype(w_dtype) for w in weights), dout.astype(x_dtype)
    found, expected = run(operands, recipe=recipe), truth(operands, **kwargs)
    assert_mlp(found[:2], expected[:2], x_dtype)
    assert_mlp(found[2:], expected[2:], w_dtype)
    for rows in found[:2]:
        assert not rows[TOTAL:].any()
    for dw in found[2:]:
        assert not dw[np.array(SIZES) == 0].any()


@pytest.mark.parametrize(
    "sizes",
    [(40,) * 5, (0, 0, 0, M, 0), (0,) * 5, (127, 1, 0, 64, 8), (-3, 90, 2**31 - 1, 9, -(2**31))],
    ids=str,
)
def test_any_group_sizes(sizes):
    operands = problem()
    assert_mlp(run(operands, sizes), truth(operands, sizes))


def test_ragged_widths():
    operands = problem(m=40, d=180, f=180, g=2)  # gpt-oss has 2880: 22.5 blocks
    assert_mlp(run(operands, (13, 27)), truth(operands, (13, 27)))


def test_runs_are_bitwise_equal_and_near_the_eager_result():
    operands = problem()
    first = run(operands)
    for x, y in zip(first, run(operands), strict=True):
        reference.assert_same_bits(x, y)
    assert_mlp([moe_mlp(*operands[:3], jnp.asarray(SIZES))], first[:1])


def test_bf16_recipe_is_two_ragged_dots():
    # In f32, so that there is no rounding to speak of; and near what FP8 gives.
    operands = problem()
    found = run(operands, recipe=BF16)
    for x, y in zip(found, truth(operands, fp8=False), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * np.abs(y).max())
    for x, y in zip(run(operands), found, strict=True):
        assert 1e-5 < reference.calc_diff(x, y) < 5e-3  # three quantised products in a row


def test_bf16_wgrad():
    operands = problem()
    found, exact = run(operands, recipe=Recipe(wgrad="bf16")), run(operands, recipe=BF16)
    all_fp8 = run(operands)
    for x, y in zip(found[:2], all_fp8[:2], strict=True):
        assert reference.calc_diff(x, y) < 1e-6
    for x, y, z in zip(found[2:], exact[2:], all_fp8[2:], strict=True):
        assert reference.calc_diff(x, y) < 0.8 * reference.calc_diff(z, y)


def test_bf16_recipe_computes_in_the_dtype_of_x():
    x, *weights, _ = problem()
    out = moe_mlp(x.astype(jnp.bfloat16), *weights, jnp.asarray(SIZES), recipe=BF16)
    assert out.dtype == jnp.bfloat16
    # Weights and h rounded to bf16.
    assert reference.calc_diff(out, truth(problem(), fp8=False)[0]) < 1e-4


@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, BF16])
def test_rows_of_no_group_reach_nothing(recipe):
    x, w_gate_up, w_down, dout = problem()
    expected = run((x, w_gate_up, w_down, dout), recipe=recipe)
    spoil = lambda x: x.at[TOTAL:].set(jnp.nan)
    found = run((spoil(x), w_gate_up, w_down, spoil(dout)), recipe=recipe)
    for actual, y in zip(found, expected, strict=True):
        reference.assert_same_bits(actual, y)


def test_a_nan_stays_in_its_row_and_its_expert():
    x, w_gate_up, w_down, dout = problem()
    out, dx, *dws = run((x.at[75, 3].set(jnp.nan), w_gate_up, w_down, dout))
    for rows in (out, dx):
        np.testing.assert_array_equal(np.isnan(rows).any(axis=1), np.arange(M) == 75)
    for dw in dws:
        np.testing.assert_array_equal(np.isnan(dw).any(axis=(1, 2)), np.arange(G) == 3)


def test_permuting_experts_permutes_the_result():
    x, w_gate_up, w_down, dout = problem()
    order = np.array([3, 0, 4, 2, 1])
    starts = np.cumsum(SIZES) - SIZES
    rows = [starts[i] + np.arange(SIZES[i]) for i in order]
    rows = np.concatenate([*rows, np.arange(TOTAL, M)])
    operands = x[rows], w_gate_up[order], w_down[order], dout[rows]
    permuted = run(operands, np.array(SIZES)[order])
    out, dx, dw_gate_up, dw_down = run((x, w_gate_up, w_down, dout))
    # Equal but for last bits, which the reference's sums over all groups do not promise.
    for x, y in zip(
        permuted, (out[rows], dx[rows], dw_gate_up[order], dw_down[order]), strict=True
    ):
        assert reference.calc_diff(x, y) < REORDERED


def scaled_weights():
    return [quantize(w, block=(128, 128), with_transpose=True) for w in problem()[1:3]]


@pytest.mark.parametrize("scaled", [0, 1])
def test_a_scaled_weight_gives_the_same_result_and_no_gradient(scaled):
    x, *weights, dout = problem()
    trained = 1 - scaled

    def pull(x, weight):
        both = lambda w: (scaled_weights()[0], w) if scaled == 0 else (w, scaled_weights()[1])
        mlp = lambda x, w: moe_mlp(x, *both(w), jnp.asarray(SIZES))
        out, pullback = jax.vjp(mlp, x, weight)
        return out, *pullback(dout)

    out, dx, dw_gate_up, dw_down = run(problem())
    expected = out, dx, (dw_gate_up, dw_down)[trained]
    # Eagerly: both cases, and other tests, then run the same programs.
    assert_mlp(pull(x, weights[trained]), expected)


def test_both_weights_scaled_and_without_fp8():
    mlp = functools.partial(moe_mlp, problem()[0], *scaled_weights(), jnp.asarray(SIZES))
    expected, *_ = run(problem())
    assert_mlp([mlp()], [expected])
    assert 1e-6 < reference.calc_diff(mlp(recipe=BF16), expected) < 3e-3


# Errors

X, UP, DOWN, ONES = jnp.ones((2, 3)), jnp.ones((4, 3, 10)), jnp.ones((4, 5, 3)), jnp.ones(4, int)


@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, BF16])
@pytest.mark.parametrize("argnum, name", [(1, "w_gate_up"), (2, "w_down")])
def test_gradient_of_a_scaled_weight_raises(argnum, name, recipe):
    operands = [X, UP, DOWN, ONES]
    operands[argnum] = quantize(operands[argnum], block=(128, 128))
    loss = lambda *args: moe_mlp(*args, recipe=recipe).sum()
    with raises(TypeError, match=f"moe_mlp: a ScaledArray {name} has no gradient; got one among"):
        jax.grad(loss, argnum, allow_int=True)(*operands)


SHARE = r"must share g, d and f; got x f32\[2,3\], w_gate_up f32\["
BAD_CALLS = [
    ((X[None], UP, DOWN, ONES), {}, ValueError, r"x must be \(m, d\); got x f32\[1,2,3\]. Fold"),
    ((X.astype(int), UP, DOWN, ONES), {}, TypeError, "x must be bf16, f16 or f32; got x s32"),
    ((quantize(X), UP, DOWN, ONES), {}, TypeError, "ScaledArray .* moe_mlp quantises x itself"),
    ((X, UP[0], DOWN, ONES), {}, ValueError, r"w_gate_up must be \(g, d, 2 f\); got"),
    ((X, UP, DOWN[0], ONES), {}, ValueError, r"w_down must be \(g, f, d\); got w_down f32\[5,3"),
    ((X, UP[:, 1:], DOWN, ONES), {}, ValueError, SHARE + r"4,2,10\], w_down f32\[4,5,3\]"),
    ((X, UP[..., 1:], DOWN, ONES), {}, ValueError, SHARE),
    ((X, UP[1:], DOWN, ONES), {}, ValueError, SHARE),
    ((X, UP, DOWN[..., 1:], ONES), {}, ValueError, SHARE),
    ((X, UP, 1.0, ONES), {}, TypeError, "w_down must be an array; got float. Or pass a ScaledArr"),
    ((X, UP.astype(jnp.float8_e5m2), DOWN, ONES), {}, TypeError, "w_gate_up must be bf16.*Scaled"),
    ((X, quantize(UP), DOWN, ONES), {}, ValueError, r"w_gate_up.block must be \(128, 128\), wh"),
    ((X, UP, DOWN, ONES[1:]), {}, ValueError, r"one size for each of the 4 experts; got .* s32\[3"),
    ((X, UP, DOWN, ONES.astype(float)), {}, TypeError, "group_sizes must be integers; got"),
    ((X, UP, DOWN, [1] * 4), {}, TypeError, "group_sizes must be an array; got list"),
    ((X, UP, DOWN, ONES), dict(recipe="fp8"), TypeError, "recipe must be a jax_fp8gemm.Recipe"),
    ((X, UP, DOWN, ONES), dict(implementation="gpu"), ValueError, "implementation must be None"),
    ((X, UP, DOWN, ONES), dict(implementation="cuda", recipe=BF16), ValueError, "an FP8 recipe"),
    ((X, UP, DOWN, ONES), dict(implementation="cuda"), RuntimeError, "'cuda' must be lowered"),
]


@pytest.mark.parametrize("args, kwargs, error, message", BAD_CALLS)
def test_bad_operands_raise(args, kwargs, error, message):
    op = "" if error is RuntimeError else "moe_mlp: "
    with raises(error, match=op + ".*" + message):
        moe_mlp(*args, **kwargs)
