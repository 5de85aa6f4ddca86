"""The ragged contraction of ragged_dot_general against float64, and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_cases
import reference
from assertions import assert_all_close, assert_all_same_bits, assert_close
from errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matmul_cases import RECIPES, saved_residuals
from meshes import mesh
from ragged_cases import (
    SIZES,
    TOTAL,
    G,
    K,
    M,
    N,
    contraction,
    contraction_problem,
    equations,
    int32,
)

from jax_fp8gemm import BF16, CHECKPOINT_NAMES, DEEPSEEK_V3


def vjp(lhs, rhs, sizes, dout, **kwargs):
    """(out, dlhs, drhs)."""
    product = lambda lhs, rhs: contraction(lhs, rhs, sizes, **kwargs)
    out, pullback = jax.vjp(product, lhs, rhs)
    return out, *pullback(dout)


def jitted_vjp(recipe=DEEPSEEK_V3, **kwargs):
    return _jitted_vjp(recipe=recipe, **kwargs)


@functools.cache
def _jitted_vjp(**kwargs):
    return jax.jit(functools.partial(vjp, **kwargs))


def truth(lhs, rhs, sizes, dout, fwd=reference.E4M3, bwd=reference.E4M3, pow2=False, exact=False):
    """(out, dlhs, drhs) in float64 of the quantised (or exact) operands, group after group."""
    quantized = lambda x, fmt, *args, **kwargs: reference.fake_quantize(
        x, *args, fmt=fmt, pow2=pow2, **kwargs
    )
    if exact:
        quantized = lambda x, fmt, *args, axis=-1: np.float64(x if axis == -1 else x.T)
    lhs, rhs, dout = map(np.asarray, (lhs, rhs, dout))
    out, dlhs, drhs = (np.zeros(x.shape) for x in (dout, lhs, rhs))
    for i, (start, end) in enumerate(reference.row_ranges(sizes, len(lhs))):
        l, r = lhs[start:end], rhs[start:end]
        out[i] = quantized(l, fwd, axis=-2) @ quantized(r, fwd, axis=-2).T
        d = quantized(dout[i], bwd, (128, 128))
        dlhs[start:end], drhs[start:end] = quantized(r, fwd) @ d.T, quantized(l, fwd) @ d
    return out, dlhs, drhs


@pytest.mark.parametrize(
    "name, dtypes, preferred",
    [
        ("deepseek_v3", (jnp.float32, jnp.float32), None),
        ("hybrid", (jnp.bfloat16, jnp.float16), jnp.bfloat16),
        ("pow2", (jnp.bfloat16, jnp.bfloat16), None),
    ],
)
def test_value_and_gradients_are_those_of_the_fake_quantised_groups(name, dtypes, preferred):
    recipe, kwargs = RECIPES[name]
    out_dtype = preferred or dtypes[0]
    lhs, rhs, dout = map(jnp.astype, contraction_problem(), (*dtypes, out_dtype))
    options = dict(preferred_element_type=preferred) if preferred else {}
    found = jitted_vjp(recipe=recipe, **options)(lhs, rhs, int32(SIZES), dout)
    expected = truth(lhs, rhs, SIZES, dout, **kwargs)
    for x, y, dtype in zip(found, expected, (out_dtype, *dtypes), strict=True):
        assert_close(x, y, dtype)


@pytest.mark.parametrize(
    "sizes",
    [(M, 0, 0, 0), (0, 0, 0, M), (127, 1, 44, 128), (0, 0, 0, 0), (-5, 100, 2**31 - 1, 7)],
    ids=str,
)
def test_any_group_sizes(sizes):
    lhs, rhs, dout = contraction_problem()
    found = jitted_vjp()(lhs, rhs, int32(sizes), dout)
    assert_all_close(found, truth(lhs, rhs, sizes, dout))
    is_empty = np.array([start == end for start, end in reference.row_ranges(sizes, M)])
    assert not np.any(np.asarray(found[0])[is_empty])


@pytest.mark.parametrize("m, g", [(1, 1), (0, 1), (0, 2)])
def test_few_rows(m, g):
    lhs, rhs, dout = contraction_problem(m=m, g=g)
    sizes = [m] * g
    found = jitted_vjp()(lhs, rhs, int32(sizes), dout)
    assert_all_close(found, truth(lhs, rhs, sizes, dout))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, BF16], ids=["fp8", "bf16"])
def test_rows_of_no_group_reach_nothing(recipe, bad):
    lhs, rhs, dout = contraction_problem()
    clean = jitted_vjp(recipe=recipe)(lhs, rhs, int32(SIZES), dout)
    bad_lhs, bad_rhs = lhs.at[TOTAL:].set(bad), rhs.at[TOTAL:].set(bad)
    found = jitted_vjp(recipe=recipe)(bad_lhs, bad_rhs, int32(SIZES), dout)
    assert_all_same_bits(found, clean)
    assert not np.any(found[1][TOTAL:]) and not np.any(found[2][TOTAL:])


def test_is_the_weight_gradient_of_ragged_dot():
    lhs, rhs, dout = ragged_cases.problem()
    drhs = jax.jit(lambda *args: ragged_cases.vjp(*args)[2])(lhs, rhs, int32(SIZES), dout)
    reference.assert_same_bits(jax.jit(contraction)(lhs, dout, int32(SIZES)), drhs)


def test_only_what_a_wanted_gradient_needs_is_quantised():
    lhs, rhs, _ = contraction_problem()
    product = lambda lhs, rhs: contraction(lhs, rhs, int32(SIZES))
    assert equations(product, lhs, rhs) == ["columns", "columns", "grouped_wgrad"]
    gradients = jax.value_and_grad(lambda *x: product(*x).sum(), (0, 1))
    forward = ["rows and columns", "rows and columns", "grouped_wgrad"]
    backward = ["block_both", "grouped_gemm", "grouped_gemm"]
    assert equations(gradients, lhs, rhs) == forward + backward
    # For dlhs alone dout needs no transpose.
    gradient = jax.value_and_grad(lambda lhs: product(lhs, rhs).sum())
    assert equations(gradient, lhs)[-2:] == ["block", "grouped_gemm"]


def test_residuals_are_fp8_and_scales():
    lhs, rhs, _ = contraction_problem()
    product = lambda lhs, rhs: contraction(lhs, rhs, int32(SIZES))
    expected = [f"f8e4m3fn[{M},{K}]", f"f32[{M},3]", f"f8e4m3fn[{M},{N}]", f"f32[{M},2]"]
    assert saved_residuals(product, lhs, rhs) == sorted(expected)
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    saving = jax.checkpoint(lambda *x: jnp.tanh(product(*x)), policy=policy)
    assert saved_residuals(saving, lhs, rhs) == sorted([*expected, f"f32[{G},{K},{N}]"])


def test_second_derivative_raises():
    lhs, rhs, _ = contraction_problem()
    loss = lambda lhs: (contraction(lhs, rhs, int32(SIZES)) ** 2).sum()
    with raises(NotImplementedError, match="matmul, .* are differentiable once, .* is not"):
        jax.grad(lambda lhs: jax.grad(loss)(lhs).sum())(lhs)


def test_vmap_of_value_and_gradients():
    lhs, rhs, dout = contraction_problem()
    sizes = [SIZES, (0, 90, 200, 5)]
    mapped = jax.jit(jax.vmap(vjp, (None, 1, 0, None)))
    found = mapped(lhs, jnp.stack([rhs, rhs[::-1]], 1), int32(sizes), dout)
    for i, element in enumerate((rhs, rhs[::-1])):
        expected = truth(lhs, element, sizes[i], dout)
        assert_all_close([x[i] for x in found], expected)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_explicitly_sharded_operands_give_the_unsharded_result(precision):
    on = mesh(AxisType.Explicit)
    specs = (P("x"), P(None, "x"), P(), P("x"))
    lhs, rhs, dout = contraction_problem()
    args = [
        jax.device_put(x, NamedSharding(on, spec))
        for x, spec in zip((lhs, rhs, int32(SIZES), dout), specs, strict=True)
    ]
    kwargs = dict(precision=precision, out_sharding=NamedSharding(on, P("x")))
    found = jax.jit(functools.partial(vjp, **kwargs))(*args)
    expected = truth(lhs, rhs, SIZES, dout, exact=precision is not None)
    assert_all_close(found, expected)
    for x, like in zip(found, (args[3], args[0], args[1]), strict=True):
        assert jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec


@pytest.mark.parametrize("precision", [None, "highest"])
def test_rows_sharded_by_shard_map(precision):
    """Each device has rows and group sizes of its own; the results are summed."""
    lhs, rhs, _ = contraction_problem()
    sizes = [(20, 0, 40, 5), (0, 0, 75, 0), (75, 0, 0, 0), (1, 2, 3, 4)]

    def local(lhs, rhs, sizes):
        return jax.lax.psum(contraction(lhs, rhs, sizes[0], precision=precision), "x")

    specs = (P("x"), P("x"), P("x"))
    on = mesh(AxisType.Auto)
    sharded = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=P())
    found = jax.jit(sharded)(lhs, rhs, int32(sizes))
    dout, exact = np.zeros((G, K, N), np.float32), precision is not None
    expected = sum(
        truth(l, r, sizes[i], dout, exact=exact)[0]
        for i, (l, r) in enumerate(zip(np.split(lhs, 4), np.split(rhs, 4), strict=True))
    )
    assert_close(found, expected, jnp.float32)


def test_gradients_of_mixed_operands_without_fp8():
    dtypes = (jnp.bfloat16, jnp.float16, jnp.bfloat16)
    lhs, rhs, dout = map(jnp.astype, contraction_problem(), dtypes)
    product = jitted_vjp(preferred_element_type=jnp.bfloat16, recipe=BF16)
    found = product(lhs, rhs, int32(SIZES), dout)
    expected = truth(lhs, rhs, SIZES, dout, exact=True)
    for x, y, dtype in zip(found, expected, (dtypes[2], *dtypes[:2]), strict=True):
        assert_close(x, y, dtype)
    assert contraction(lhs, rhs, int32(SIZES), recipe=BF16).dtype == jnp.float32


def test_without_fp8_it_is_differentiable_twice():
    lhs, rhs, _ = contraction_problem()
    # The loss is a quadratic form in lhs, so its gradient at lhs is its Hessian times lhs.
    product = lambda lhs: contraction(lhs, rhs, int32(SIZES), recipe=BF16)
    gradient = jax.grad(lambda lhs: (product(lhs) ** 2).sum() / 2)
    hessian_times_lhs = jax.grad(lambda x: jnp.vdot(gradient(x), lhs))(lhs)
    assert reference.calc_diff(hessian_times_lhs, gradient(lhs)) < 1e-12


def test_named_scopes_reach_the_program():
    lhs, rhs, dout = contraction_problem()
    text = jitted_vjp().lower(lhs, rhs, int32(SIZES), dout).as_text(debug_info=True)
    for scope in ("fp8gemm_ragged_dot_general", "fp8gemm_grouped_wgrad", "dlhs", "drhs"):
        assert scope in text
