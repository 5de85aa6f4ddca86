"""matmul under JAX's transformations: what is computed and kept, batching, donation, export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED, assert_close, assert_diff_below
from errors import raises
from matmul_cases import K, M, N, equations, problem, random, saved_residuals, vjp

from jax_fp8gemm import CHECKPOINT_NAMES, DEEPSEEK_V3, Recipe, matmul, quantize


@pytest.mark.parametrize("argnums", [0, 1])
def test_only_what_a_wanted_gradient_needs_is_quantised(argnums):
    loss = lambda *args: matmul(*args).sum()
    lhs, rhs, _ = problem()
    outer = jax.make_jaxpr(matmul)(lhs, rhs).eqns
    (inner,) = (eqn.params["call_jaxpr"].eqns for eqn in outer if "call_jaxpr" in eqn.params)
    assert [eqn.params.get("mode") for eqn in inner] == ["row", "block_transposed", None]
    expected = {
        0: ["row", "block_both", "1d2d", "row", "1d2d"],
        1: ["row_column", "block_both", "1d2d", "column", "1d1d"],
    }
    assert equations(jax.value_and_grad(loss, argnums), lhs, rhs) == expected[argnums]
    # Without the value, the forward product goes too, and with it what only it reads.
    expected = {0: ["block", "row", "1d2d"], 1: ["column", "column", "1d1d"]}
    assert equations(jax.grad(loss, argnums), lhs, rhs) == expected[argnums]


def test_both_gradients_read_each_operand_once():
    lhs, rhs, _ = problem()
    gradients = jax.value_and_grad(lambda *args: matmul(*args).sum(), (0, 1))
    expected = ["row_column", "block_both", "1d2d", "row_column", "1d2d", "1d1d"]
    assert equations(gradients, lhs, rhs) == expected


def test_scaled_rhs_is_not_quantised_again_nor_transposed():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128), with_transpose=True)
    gradient = jax.value_and_grad(lambda lhs, scaled: matmul(lhs, scaled).sum())
    assert equations(gradient, lhs, scaled) == ["row", "1d2d", "row", "1d2d"]
    text = str(jax.make_jaxpr(gradient)(lhs, scaled))
    assert f"f8_e4m3fn[{N},{K}] = transpose" not in text


# Those of lhs and rhs, in rows of whole scale blocks.
VALUES_KEPT = [f"f8e4m3fn[{K},{-(-extent // 128) * 128}]" for extent in (M, N)]


def test_residuals_are_fp8_and_scales():
    lhs, rhs, _ = problem()
    expected = [f"f32[{K},1]", "f32[3,2]", *VALUES_KEPT]
    assert saved_residuals(matmul, lhs, rhs) == sorted(expected)


def kinked(out):
    """Its derivative reads the sign of `out` alone, which no rounding of a sum changes: cotangents
    are then the same to the bit, and so are their FP8 values."""
    return jnp.where(out > 0, out, -0.5 * out)


def assert_gradients_of_kinked(function):
    """The gradients of kinked(matmul) in float64, at a given cotangent."""
    lhs, rhs, dout = problem()
    found = jax.jit(lambda *x: jax.vjp(function, *x)[1](dout))(lhs, rhs)
    out, *_ = reference.matmul_vjp(lhs, rhs)
    cotangent = np.where(out > 0, np.float32(1), np.float32(-0.5)) * np.asarray(dout)
    for x, expected in zip(found, reference.matmul_vjp(lhs, rhs, cotangent)[1:], strict=True):
        assert_close(x, expected, jnp.float32)


def test_checkpoint_by_name_saves_fp8_and_quantises_nothing_again():
    lhs, rhs, dout = problem()
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    layer = lambda lhs, rhs: kinked(matmul(lhs, rhs))
    saving, nothing = (
        jax.checkpoint(layer, policy=p) for p in (policy, jax.checkpoint_policies.nothing_saveable)
    )
    assert_gradients_of_kinked(saving)
    expected = [f"f32[{K},1]", "f32[3,2]", f"f32[{M},{N}]"]
    expected += VALUES_KEPT
    assert saved_residuals(saving, lhs, rhs) == sorted(expected)
    gradients = lambda f: jax.grad(lambda *x: (f(*x) * dout).sum(), (0, 1))
    text = lambda f: str(jax.make_jaxpr(gradients(f))(lhs, rhs))
    count = lambda f: text(f).count("= jax_fp8gemm_quantize[")
    assert (count(saving), count(nothing)) == (3, 5)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_gradients_through_nested_transformations(wrap):
    assert_gradients_of_kinked(wrap(lambda lhs, rhs: kinked(wrap(matmul)(lhs, rhs))))


@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, Recipe(wgrad="bf16")], ids=["fp8", "bf16"])
def test_several_cotangents_of_one_call(recipe):
    lhs, rhs, dout = problem()
    douts = jnp.stack([dout, 2 * dout])
    _, pullback = jax.vjp(functools.partial(matmul, recipe=recipe), lhs, rhs)
    for found, of_first in zip(jax.vmap(pullback)(douts), pullback(dout), strict=True):
        assert_diff_below(REORDERED, found, jnp.stack([of_first, 2 * of_first]))


def test_second_derivative_raises():
    lhs, rhs, _ = problem()
    loss = lambda lhs: (matmul(lhs, rhs) ** 2).sum()
    with raises(NotImplementedError, match="matmul, .* are differentiable once, .* is not"):
        jax.grad(lambda lhs: jax.grad(loss)(lhs).sum())(lhs)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 2)])
def test_vmap_of_forward_alone_and_of_value_and_gradients(in_axes):
    batched = random(3, M, K), random(3, K, N, seed=1)
    dout = random(3, M, N, seed=2)
    place = lambda x, d: x[0] if d is None else jnp.moveaxis(x, 0, d)
    args = map(place, batched, in_axes)
    both = lambda lhs, rhs, dout: (matmul(lhs, rhs), vjp(lhs, rhs, dout))
    forward, found = jax.jit(jax.vmap(both, (*in_axes, 0)))(*args, dout)
    for i in range(3):
        element = (x[0 if d is None else i] for x, d in zip(batched, in_axes, strict=True))
        expected = reference.matmul_vjp(*element, dout[i])
        for x, y in zip((forward, *found), (expected[0], *expected), strict=True):
            assert_close(x[i], y, jnp.float32)


def test_scan_over_layers():
    lhs, weights = random(M, K), random(3, K, K, seed=1) * 0.05
    chain = lambda lhs, weights: jax.lax.scan(lambda x, w: (matmul(x, w), None), lhs, weights)[0]
    looped = lambda lhs, weights: functools.reduce(matmul, list(weights), lhs)
    gradient = lambda f: jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1))
    # The loop runs eagerly: all its layers are then the same few programs.
    expected = gradient(looped)(lhs, weights)
    for x, y in zip(jax.jit(gradient(chain))(lhs, weights), expected, strict=True):
        # An f32 rounding between two products may move an FP8 rounding in the next.
        assert reference.calc_diff(x, y) < 1e-6


def test_donated_arguments():
    lhs, rhs = random(M, K), random(K, K, seed=1)
    donated = jnp.array(lhs)
    out = jax.jit(matmul, donate_argnums=0)(donated, rhs)
    assert_close(out, reference.matmul_vjp(lhs, rhs)[0], jnp.float32)
    assert donated.is_deleted()


def test_export_round_trip():
    lhs, rhs, _ = problem()
    exported = jax.export.export(jax.jit(matmul))(lhs, rhs)
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(lhs, rhs), reference.matmul_vjp(lhs, rhs)[0], jnp.float32)


def test_named_scopes_reach_the_program():
    lhs, rhs, _ = problem()
    gradients = jax.jit(jax.grad(lambda *x: matmul(*x).sum(), (0, 1)))
    text = gradients.lower(lhs, rhs).as_text(debug_info=True)
    for scope in ("fp8gemm_matmul", "fp8gemm_quantize", "fp8gemm_gemm", "dlhs", "drhs"):
        assert scope in text
