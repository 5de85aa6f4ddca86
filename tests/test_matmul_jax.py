"""matmul under JAX's transformations: what is computed and kept, batching, donation, export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises
from matmul_cases import K, M, N, assert_close, equations, problem, random, saved_residuals

from jax_fp8gemm import CHECKPOINT_NAMES, matmul, quantize


@pytest.mark.parametrize("argnums", [0, 1])
def test_only_what_a_wanted_gradient_needs_is_quantised(argnums):
    loss = lambda *args: matmul(*args).sum()
    lhs, rhs, _ = problem()
    inner = jax.make_jaxpr(matmul)(lhs, rhs).eqns[0].params["call_jaxpr"].eqns
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


def test_residuals_are_fp8_and_scales():
    lhs, rhs, _ = problem()
    expected = [f"f32[{K},1]", "f32[3,2]", f"f8e4m3fn[{K},{M}]", f"f8e4m3fn[{K},{N}]"]
    assert saved_residuals(matmul, lhs, rhs) == sorted(expected)


def test_checkpoint_by_name_saves_fp8_and_quantises_nothing_again():
    lhs, rhs, _ = problem()
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    layer = lambda lhs, rhs: jnp.tanh(matmul(lhs, rhs))
    saving, nothing = (
        jax.checkpoint(layer, policy=p) for p in (policy, jax.checkpoint_policies.nothing_saveable)
    )
    plain, *others = (
        jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1)) for f in (layer, saving, nothing)
    )
    for other in others:
        for x, y in zip(jax.jit(other)(lhs, rhs), jax.jit(plain)(lhs, rhs), strict=True):
            # Other programs, in which XLA on CPU sums in other orders.
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    expected = [f"f32[{K},1]", "f32[3,2]", f"f32[{M},{N}]"]
    expected += [f"f8e4m3fn[{K},{M}]", f"f8e4m3fn[{K},{N}]"]
    assert saved_residuals(saving, lhs, rhs) == sorted(expected)
    count = lambda f: str(jax.make_jaxpr(f)(lhs, rhs)).count("= jax_fp8gemm_quantize[")
    assert (count(others[0]), count(others[1])) == (3, 5)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_gradients_through_nested_transformations(wrap):
    lhs, rhs, dout = problem()
    inner = wrap(lambda lhs, rhs: jnp.tanh(wrap(matmul)(lhs, rhs)))
    plain = lambda lhs, rhs: jnp.tanh(matmul(lhs, rhs))
    pull = lambda f: jax.jit(lambda *x: jax.vjp(f, *x)[1](dout))(lhs, rhs)
    for x, y in zip(pull(inner), pull(plain), strict=True):
        # As above; atol is 1e-5 of the largest gradients, about 10.
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def test_second_derivative_raises():
    lhs, rhs, _ = problem()
    loss = lambda lhs: (matmul(lhs, rhs) ** 2).sum()
    with raises(NotImplementedError, match="not differentiable.*once"):
        jax.grad(lambda lhs: jax.grad(loss)(lhs).sum())(lhs)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_vmap_and_vmap_of_grad(in_axes):
    batched = [random(3, M, K), random(3, K, N, seed=1)]
    place = lambda x, d: x[0] if d is None else jnp.moveaxis(x, 0, d)
    args = list(map(place, batched, in_axes))
    element = lambda x, d, i: x[0] if d is None else x[i]
    gradients = jax.grad(lambda *x: (matmul(*x) ** 2).sum(), (0, 1))
    out = jax.jit(jax.vmap(matmul, in_axes))(*args)
    dlhs, drhs = jax.jit(jax.vmap(gradients, in_axes))(*args)
    for i in range(3):
        lhs, rhs = (element(x, d, i) for x, d in zip(batched, in_axes, strict=True))
        expected, *_ = reference.matmul_vjp(lhs, rhs)
        assert_close(out[i], expected, jnp.float32)
        dout = 2 * matmul(lhs, rhs)
        _, expected_dlhs, expected_drhs = reference.matmul_vjp(lhs, rhs, dout)
        # dout itself is within an f32 rounding, which may move one of its FP8 roundings.
        for x, expected in ((dlhs[i], expected_dlhs), (drhs[i], expected_drhs)):
            assert reference.calc_diff(x, expected) < 1e-6


def test_scan_over_layers():
    lhs, weights = random(M, K), random(3, K, K, seed=1) * 0.05
    chain = lambda lhs, weights: jax.lax.scan(lambda x, w: (matmul(x, w), None), lhs, weights)[0]
    looped = lambda lhs, weights: functools.reduce(matmul, list(weights), lhs)
    gradient = lambda f: jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1)))(lhs, weights)
    for x, y in zip(gradient(chain), gradient(looped), strict=True):
        # An f32 rounding between two products may move an FP8 rounding in the next.
        assert reference.calc_diff(x, y) < 1e-6


def test_donated_arguments():
    lhs, rhs = random(M, K), random(K, K, seed=1)
    expected = matmul(lhs, rhs)
    donated = jnp.array(lhs)
    out = jax.jit(matmul, donate_argnums=0)(donated, rhs)
    # An eager call and a jitted one: XLA may sum in another order.
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert donated.is_deleted()


def test_export_round_trip():
    lhs, rhs, _ = problem()
    exported = jax.export.export(jax.jit(matmul))(lhs, rhs)
    again = jax.export.deserialize(exported.serialize())
    # As above.
    np.testing.assert_allclose(again.call(lhs, rhs), matmul(lhs, rhs), rtol=1e-6, atol=1e-6)


def test_named_scopes_reach_the_program():
    lhs, rhs, _ = problem()
    gradients = jax.jit(jax.grad(lambda *x: matmul(*x).sum(), (0, 1)))
    text = gradients.lower(lhs, rhs).as_text(debug_info=True)
    for scope in ("fp8gemm_matmul", "fp8gemm_quantize", "fp8gemm_gemm", "dlhs", "drhs"):
        assert scope in text
