"""matmul against the fake-quantised product and gradients in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises
from jax.interpreters import partial_eval

import jax_fp8gemm
from jax_fp8gemm import BF16, CHECKPOINT_NAMES, DEEPSEEK_V3, HYBRID, Recipe, matmul, quantize

# f32 sums, then the rounding to the dtype; relative to the largest entry.
TOLERANCE = {jnp.float32: 3e-6, jnp.bfloat16: 2**-8, jnp.float16: 2**-10}
M, N, K = 70, 136, 300  # all ragged


def assert_close(x, expected, dtype):
    assert x.dtype == dtype and x.shape == expected.shape
    bound = TOLERANCE[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(x, np.float64), expected, rtol=0, atol=bound)


@functools.cache
def random(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def problem(dtype=jnp.float32):
    """lhs (m, k), rhs (k, n), dout (m, n)."""
    return random(M, K, dtype=dtype), random(K, N, dtype=dtype, seed=1), random(M, N, dtype=dtype)


def vjp(lhs, rhs, dout, **kwargs):
    out, pullback = jax.vjp(functools.partial(matmul, **kwargs), lhs, rhs)
    return out, *pullback(dout)


def equations(function, *args):
    """Our primitives that a jitted `function` is left with, in order; quantisation by mode."""
    found = []
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith("jax_fp8gemm"):
            found.append(eqn.params.get("mode") or ("1d1d" if eqn.params["is_1d1d"] else "1d2d"))
    return found


RECIPES = {
    "deepseek_v3": (DEEPSEEK_V3, {}),
    "hybrid": (HYBRID, dict(bwd=jnp.float8_e5m2)),
    "pow2": (Recipe(pow2_scale=True), dict(pow2=True)),
    "wgrad_bf16": (Recipe(wgrad="bf16"), dict(fp8_drhs=False)),
    "e5m2": (Recipe(fwd="e5m2", bwd="e5m2"), dict(fwd=jnp.float8_e5m2, bwd=jnp.float8_e5m2)),
}


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("deepseek_v3", jnp.bfloat16),
        ("deepseek_v3", jnp.float16),
        ("deepseek_v3", jnp.float32),
        ("hybrid", jnp.bfloat16),
        ("pow2", jnp.bfloat16),
        ("e5m2", jnp.bfloat16),
        ("wgrad_bf16", jnp.bfloat16),
        ("wgrad_bf16", jnp.float32),
    ],
)
def test_value_and_gradients_are_those_of_the_fake_quantised_product(name, dtype):
    recipe, kwargs = RECIPES[name]
    operands = problem(dtype)
    if name == "wgrad_bf16":
        # drhs multiplies bf16: operands that are bf16 already make the truth exact.
        operands = [x.astype(jnp.bfloat16).astype(dtype) for x in operands]
    found = jax.jit(functools.partial(vjp, recipe=recipe))(*operands)
    for x, expected in zip(found, reference.matmul_vjp(*operands, **kwargs), strict=True):
        assert_close(x, expected, dtype)


def test_eager_equals_jit():
    operands = problem()
    eager, jitted = vjp(*operands), jax.jit(vjp)(*operands)
    for x, y in zip(eager, jitted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_is_near_the_unquantised_product():
    lhs, rhs, _ = problem()
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
    assert 1e-5 < reference.calc_diff(matmul(lhs, rhs), exact) < 1e-3


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


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_gradients_through_nested_transformations(wrap):
    lhs, rhs, dout = problem()
    inner = wrap(lambda lhs, rhs: jnp.tanh(wrap(matmul)(lhs, rhs)))
    plain = lambda lhs, rhs: jnp.tanh(matmul(lhs, rhs))
    pull = lambda f: jax.jit(lambda *x: jax.vjp(f, *x)[1](dout))(lhs, rhs)
    for x, y in zip(pull(inner), pull(plain), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


def test_bf16_recipe_is_the_plain_dot():
    lhs, rhs, dout = problem(jnp.bfloat16)
    ours = jax.jit(functools.partial(vjp, recipe=BF16))(lhs, rhs, dout)
    plain = jax.jit(lambda l, r, d: (lambda o, f: (o, *f(d)))(*jax.vjp(jnp.matmul, l, r)))
    for x, y in zip(ours, plain(lhs, rhs, dout), strict=True):
        reference.assert_same_bits(x, y)


@pytest.mark.parametrize(
    "precision",
    ["high", jax.lax.Precision.HIGHEST, "highest", (None, "high"), (jax.lax.Precision.HIGH,) * 2],
)
def test_high_precision_runs_without_fp8(precision):
    lhs, rhs, _ = problem()
    np.testing.assert_allclose(
        matmul(lhs, rhs, precision=precision), lhs @ rhs, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT, (None, None)])
def test_default_precision_is_fp8(precision):
    lhs, rhs, _ = problem()
    np.testing.assert_array_equal(matmul(lhs, rhs, precision=precision), matmul(lhs, rhs))


@pytest.mark.parametrize(
    "precision", ["bf16", 3, ("high",), jax.lax.DotAlgorithmPreset.BF16_BF16_F32]
)
def test_unknown_precision_raises(precision):
    lhs, rhs, _ = problem()
    with raises(ValueError, match="matmul: precision must be None, DEFAULT, HIGH or HIGHEST"):
        matmul(lhs, rhs, precision=precision)


@pytest.mark.parametrize("kwargs", [dict(precision="highest"), dict(recipe=BF16)])
def test_cuda_implementation_of_the_xla_path_raises(kwargs):
    lhs, rhs, _ = problem()
    with raises(ValueError, match="implementation='cuda' must go with an FP8 recipe and default"):
        matmul(lhs, rhs, implementation="cuda", **kwargs)


def test_preferred_element_type_and_mixed_operands():
    lhs, rhs, _ = problem(jnp.bfloat16)
    full = matmul(lhs, rhs, preferred_element_type=jnp.float32)
    (expected,) = reference.matmul_vjp(lhs, rhs)
    assert_close(full, expected, jnp.float32)
    assert matmul(lhs, rhs.astype(jnp.float32)).dtype == jnp.float32
    dlhs, drhs = jax.grad(lambda l, r: matmul(l, r).sum(), (0, 1))(lhs, rhs.astype(jnp.float32))
    assert (dlhs.dtype, drhs.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    "lhs_shape, rhs_shape",
    [
        ((K,), (K,)),
        ((K,), (K, N)),
        ((M, K), (K,)),
        ((2, 3, 5, K), (K, N)),
        ((2, 3, 5, K), (K,)),
        ((5, K), (2, 3, K, N)),
        ((2, 1, 5, K), (3, K, N)),
        ((2, 5, K), (2, K, N)),
        ((1, 5, K), (2, 1, K, N)),
        ((2, 0, K), (K, N)),
        ((M, 0), (0, N)),
    ],
)
def test_shapes_are_those_of_jnp_matmul(lhs_shape, rhs_shape):
    lhs, rhs = random(*lhs_shape), random(*rhs_shape, seed=1)
    both = jax.value_and_grad(lambda *x: ((y := matmul(*x)).sum(), y), (0, 1), has_aux=True)
    (_, out), (dlhs, drhs) = jax.jit(both)(lhs, rhs)
    exact = np.matmul(np.asarray(lhs), np.asarray(rhs))
    assert out.shape == exact.shape
    # 2 FP8 roundings of 2^-4 at worst, averaged over k terms.
    np.testing.assert_allclose(out, exact, rtol=0, atol=0.15 * math.sqrt(K))
    assert (dlhs.shape, drhs.shape) == (lhs_shape, rhs_shape)


def test_folded_rows_equal_the_rows_alone():
    lhs, rhs = random(4, 7, K), random(K, N, seed=1)
    out = matmul(lhs, rhs)
    for i in range(4):
        np.testing.assert_allclose(out[i], matmul(lhs[i], rhs), rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("with_transpose", [False, True])
def test_scaled_rhs_gives_the_same_result_and_dlhs(with_transpose):
    lhs, rhs, dout = problem(jnp.bfloat16)
    scaled = quantize(rhs, block=(128, 128), with_transpose=with_transpose)
    out, pullback = jax.vjp(lambda lhs: matmul(lhs, scaled), lhs)
    expected_out, expected_dlhs, _ = vjp(lhs, rhs, dout)
    reference.assert_same_bits(out, expected_out)
    reference.assert_same_bits(pullback(dout)[0], expected_dlhs)


def test_scaled_rhs_is_not_quantised_again_nor_transposed():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128), with_transpose=True)
    gradient = jax.value_and_grad(lambda lhs, scaled: matmul(lhs, scaled).sum())
    assert equations(gradient, lhs, scaled) == ["row", "1d2d", "row", "1d2d"]
    text = str(jax.make_jaxpr(gradient)(lhs, scaled))
    assert f"f8_e4m3fn[{N},{K}] = transpose" not in text


def test_scaled_rhs_without_fp8():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128))
    np.testing.assert_allclose(
        matmul(lhs, scaled, precision="highest"), lhs @ scaled.dequantize(), rtol=1e-5, atol=1e-5
    )


def test_gradient_of_a_scaled_rhs_raises():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128))
    with raises(TypeError, match="matmul: a ScaledArray rhs has no gradient; got one among"):
        jax.grad(lambda scaled: matmul(lhs, scaled).sum(), allow_int=True)(scaled)


def test_second_derivative_raises():
    lhs, rhs, _ = problem()
    loss = lambda lhs: (matmul(lhs, rhs) ** 2).sum()
    with raises(NotImplementedError, match="not differentiable.*once"):
        jax.grad(lambda lhs: jax.grad(loss)(lhs).sum())(lhs)


def saved_residuals(function, *args):
    """Types of what jax.vjp keeps, arguments aside."""
    _, pullback = jax.vjp(function, *args)
    leaves = [x for x in jax.tree.leaves(pullback) if hasattr(x, "shape")]
    return sorted(
        jax_fp8gemm._checks.short_type(x) for x in leaves if not any(x is arg for arg in args)
    )


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
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    expected = [f"f32[{K},1]", "f32[3,2]", f"f32[{M},{N}]"]
    expected += [f"f8e4m3fn[{K},{M}]", f"f8e4m3fn[{K},{N}]"]
    assert saved_residuals(saving, lhs, rhs) == sorted(expected)
    count = lambda f: str(jax.make_jaxpr(f)(lhs, rhs)).count("= jax_fp8gemm_quantize[")
    assert (count(others[0]), count(others[1])) == (3, 5)


def test_donated_arguments():
    lhs, rhs = random(M, K), random(K, K, seed=1)
    expected = matmul(lhs, rhs)
    donated = jnp.array(lhs)
    out = jax.jit(matmul, donate_argnums=0)(donated, rhs)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert donated.is_deleted()


def test_scan_over_layers():
    lhs, weights = random(M, K), random(3, K, K, seed=1) * 0.05
    chain = lambda lhs, weights: jax.lax.scan(lambda x, w: (matmul(x, w), None), lhs, weights)[0]
    looped = lambda lhs, weights: functools.reduce(matmul, list(weights), lhs)
    gradient = lambda f: jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1)))(lhs, weights)
    for x, y in zip(gradient(chain), gradient(looped), strict=True):
        assert reference.calc_diff(x, y) < 1e-6


def test_export_round_trip():
    lhs, rhs, _ = problem()
    exported = jax.export.export(jax.jit(matmul))(lhs, rhs)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(lhs, rhs), matmul(lhs, rhs), rtol=1e-6, atol=1e-6)


def test_named_scopes_reach_the_program():
    lhs, rhs, _ = problem()
    gradients = jax.jit(jax.grad(lambda *x: matmul(*x).sum(), (0, 1)))
    text = gradients.lower(lhs, rhs).as_text(debug_info=True)
    for scope in ("fp8gemm_matmul", "fp8gemm_quantize", "fp8gemm_gemm", "dlhs", "drhs"):
        assert scope in text


@pytest.mark.parametrize(
    "lhs, rhs, kwargs, error, message",
    [
        (
            jnp.ones((2, 3)),
            jnp.ones((4, 5)),
            {},
            ValueError,
            r"lhs and rhs must share k; got k=3 in lhs f32\[2,3\], k=4 in rhs f32\[4,5\]",
        ),
        (
            jnp.ones((2, 3), int),
            jnp.ones((3, 2)),
            {},
            TypeError,
            r"lhs must be bf16.*lhs s32\[2,3\]",
        ),
        (
            jnp.ones((2, 3)),
            jnp.ones((3, 2), jnp.float8_e4m3fn),
            {},
            TypeError,
            r"rhs must be bf16, f16 or f32; got rhs f8e4m3fn\[3,2\]. Quantised .* ScaledArray",
        ),
        (jnp.ones(()), jnp.ones((3, 2)), {}, ValueError, r"lhs must be \(..., m, k\) or \(k,\)"),
        (jnp.ones((2, 3)), 2.0, {}, TypeError, "rhs must be an array; got float"),
        (
            jnp.ones((2, 2, 3)),
            jnp.ones((5, 3, 2)),
            {},
            ValueError,
            r"batch dimensions of lhs and rhs must broadcast; got lhs f32\[2,2,3\], rhs",
        ),
        (
            jnp.ones((2, 3)),
            jnp.ones((3, 2)),
            dict(preferred_element_type=jnp.int32),
            TypeError,
            "preferred_element_type must be bf16, f16 or f32; got s32",
        ),
    ],
)
def test_bad_input_is_told_at_trace_time(lhs, rhs, kwargs, error, message):
    with raises(error, match="matmul: " + message):
        matmul(lhs, rhs, **kwargs)


def test_scaled_lhs_raises():
    message = r"matmul: lhs must be an array; got a ScaledArray f8.*\[2,3\]. matmul quantises lhs"
    with raises(TypeError, match=message):
        matmul(quantize(jnp.ones((2, 3))), jnp.ones((3, 2)))


def test_scaled_rhs_with_row_blocks_raises():
    with raises(ValueError, match=r"matmul: rhs.block must be \(128, 128\), .*got \(1, 128\)"):
        matmul(jnp.ones((2, 3)), quantize(jnp.ones((3, 2))))
