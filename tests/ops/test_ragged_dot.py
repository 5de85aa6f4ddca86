"""ragged_dot against the fake-quantised product and gradients of each group alone, in float64."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import assert_all_close, assert_all_same_bits, assert_close
from errors import raises
from matmul_cases import RECIPES
from ragged_cases import SIZES, TOTAL, G, M, int32, jitted, problem, truth

from jax_fp8gemm import BF16, DEEPSEEK_V3, Recipe, ScaledArray, quantize, ragged_dot


@pytest.mark.parametrize(
    "name, dtypes, preferred",
    [
        ("deepseek_v3", (jnp.bfloat16, jnp.bfloat16), None),
        ("deepseek_v3", (jnp.float32, jnp.float32), None),
        ("hybrid", (jnp.bfloat16, jnp.float16), None),  # f32, as for all mixed operands
        ("pow2", (jnp.float16, jnp.float16), None),
        ("e5m2", (jnp.float32, jnp.bfloat16), jnp.bfloat16),
        ("square_lhs", (jnp.bfloat16, jnp.float32), None),
        ("wgrad_bf16", (jnp.float32, jnp.float32), None),
    ],
)
def test_value_and_gradients_are_those_of_the_fake_quantised_groups(name, dtypes, preferred):
    recipe, kwargs = RECIPES[name]
    lhs, rhs, dout = problem()
    if name == "wgrad_bf16":
        # drhs multiplies bf16: operands that are bf16 already make the truth exact.
        lhs, rhs, dout = (x.astype(jnp.bfloat16).astype(x.dtype) for x in (lhs, rhs, dout))
    out_dtype = preferred or (dtypes[0] if dtypes[0] == dtypes[1] else jnp.float32)
    lhs, rhs, dout = lhs.astype(dtypes[0]), rhs.astype(dtypes[1]), dout.astype(out_dtype)
    options = dict(preferred_element_type=preferred) if preferred else {}
    found = jitted(recipe=recipe, **options)(lhs, rhs, int32(SIZES), dout)
    expected = truth(lhs, rhs, SIZES, dout, **kwargs)
    for x, y, dtype in zip(found, expected, (out_dtype, *dtypes), strict=True):
        assert_close(x, y, dtype)


def test_is_near_the_unquantised_product():
    lhs, rhs, _ = problem()
    exact = jax.lax.ragged_dot(lhs, rhs, int32(SIZES))
    found, *_ = jitted()(lhs, rhs, int32(SIZES), problem()[2])
    assert 1e-5 < reference.calc_diff(found, exact) < 1e-3


# Groups


@pytest.mark.parametrize(
    "sizes",
    [
        *itertools.product((0, 45), repeat=G),  # empty groups in all patterns
        (M, 0, 0, 0),
        (0, 0, 0, M),
        (127, 1, 44, 128),  # around a scale block; no row left over
        (-5, 100, -(2**31), 100),
        (100, 2**31 - 1, 5, 2**31 - 1),
        (0, M + 1, 0, 3),
    ],
    ids=str,
)
def test_any_group_sizes(sizes):
    lhs, rhs, dout = problem()
    out, dlhs, drhs = jitted()(lhs, rhs, int32(sizes), dout)
    assert_all_close((out, dlhs, drhs), truth(lhs, rhs, sizes, dout))
    ranges = reference.row_ranges(sizes, M)
    assert not np.any(out[ranges[-1][1] :]) and not np.any(dlhs[ranges[-1][1] :])
    is_empty = np.array([start == end for start, end in ranges])
    assert not np.any(np.asarray(drhs)[is_empty])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, Recipe(wgrad="bf16"), BF16], ids=str)
def test_rows_of_no_group_reach_nothing(recipe, bad):
    lhs, rhs, dout = problem()
    clean = jitted(recipe=recipe)(lhs, rhs, int32(SIZES), dout)
    bad_lhs, bad_dout = lhs.at[TOTAL:].set(bad), dout.at[TOTAL:].set(bad)
    found = jitted(recipe=recipe)(bad_lhs, rhs, int32(SIZES), bad_dout)
    assert_all_same_bits(found, clean)
    assert not np.any(found[0][TOTAL:]) and not np.any(found[1][TOTAL:])


def test_a_nan_stays_in_its_row_and_group():
    lhs, rhs, dout = problem()
    out, dlhs, drhs = jitted()(lhs.at[3, 5].set(np.nan), rhs, int32(SIZES), dout)
    np.testing.assert_array_equal(np.isnan(out).any(axis=1), np.arange(M) == 3)
    assert np.isfinite(dlhs).all()
    np.testing.assert_array_equal(np.isnan(drhs).any(axis=(1, 2)), np.arange(G) == 0)


@pytest.mark.parametrize("m, sizes", [(130, (100,)), (0, (0,)), (0, (3, -1))])
def test_one_group_and_no_rows(m, sizes):
    lhs, rhs, dout = problem(m=m, g=len(sizes))
    found = jitted()(lhs, rhs, int32(sizes), dout)
    assert_all_close(found, truth(lhs, rhs, sizes, dout))


def test_int64_sizes():
    lhs, rhs, dout = problem()
    sizes = (70, -(2**40), 100, 2**40 + 5)
    with jax.enable_x64(True):
        found = jitted()(lhs, rhs, jnp.asarray(sizes, jnp.int64), dout)
    assert_all_close(found, truth(lhs, rhs, sizes, dout))


def test_a_group_offset_beyond_int32_is_the_last():
    lhs, rhs, _ = problem()
    found, expected = (
        ragged_dot(lhs, rhs, int32(MORE_SIZES), group_offset=offset)
        for offset in (np.array([2**32]), np.array([2], np.int32))
    )
    reference.assert_same_bits(found, expected)


MORE_SIZES = (40, 30, 0, 110, 60, 20)  # of more groups than rhs holds


@pytest.mark.parametrize("offset, first", [(-1, 0), (0, 0), (1, 1), (2, 2), (2**31 - 1, 2)])
def test_group_offset(offset, first):
    """rhs holds the groups from `first` on; the rows of the others may hold anything."""
    lhs, rhs, dout = problem()
    expected = truth(lhs, rhs, MORE_SIZES, dout, first)
    start, size = sum(MORE_SIZES[:first]), sum(MORE_SIZES[first:][:G])
    is_ours = (np.arange(M) >= start) & (np.arange(M) < start + size)
    lhs = jnp.where(is_ours[:, None], lhs, np.nan)
    dout = jnp.where(is_ours[:, None], dout, np.inf)
    args = (lhs, rhs, int32(MORE_SIZES), dout, int32([offset]))
    out, dlhs, drhs = jitted()(*args)
    assert_all_close((out, dlhs, drhs), expected)
    assert not np.any(out[~is_ours]) and not np.any(dlhs[~is_ours])
    for x, y in zip(jitted(recipe=BF16)(*args), expected, strict=True):
        assert reference.calc_diff(x, y) < 2e-3


def test_sizes_have_a_float0_cotangent():
    lhs, rhs, _ = problem()
    loss = lambda lhs, sizes: ragged_dot(lhs, rhs, sizes).sum()
    gradients = jax.grad(loss, (0, 1), allow_int=True)
    dlhs, dsizes = jax.eval_shape(gradients, lhs, int32(SIZES))
    assert (dlhs.dtype, dlhs.shape) == (lhs.dtype, lhs.shape)
    assert (dsizes.dtype, dsizes.shape) == (jax.dtypes.float0, (G,))


# Without FP8


@pytest.mark.parametrize(
    "kwargs, dtype", [(dict(recipe=BF16), jnp.bfloat16), (dict(precision="highest"), jnp.float32)]
)
def test_without_fp8_is_that_of_lax(kwargs, dtype):
    lhs, rhs, dout = problem(dtype)
    lax_dot = functools.partial(jax.lax.ragged_dot, precision=kwargs.get("precision"))

    @jax.jit
    def plain(lhs, rhs, sizes, dout):
        out, pullback = jax.vjp(lambda lhs, rhs: lax_dot(lhs, rhs, sizes), lhs, rhs)
        return out, *pullback(dout)

    args = (lhs, rhs, int32(SIZES), dout)
    assert_all_same_bits(jitted(**kwargs)(*args), plain(*args))


@pytest.mark.parametrize(
    "precision", ["high", jax.lax.Precision.HIGHEST, (None, "high"), (jax.lax.Precision.HIGH,) * 2]
)
def test_high_precision_runs_without_fp8(precision):
    lhs, rhs, _ = problem()
    exact = jax.lax.ragged_dot(lhs, rhs, int32(SIZES))
    found = ragged_dot(lhs, rhs, int32(SIZES), precision)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["default", jax.lax.Precision.DEFAULT, (None, None)])
def test_default_precision_is_fp8(precision):
    lhs, rhs, _ = problem()
    found = ragged_dot(lhs, rhs, int32(SIZES), precision)
    np.testing.assert_array_equal(found, ragged_dot(lhs, rhs, int32(SIZES)))


# Arguments and dtypes


def test_positional_arguments_are_those_of_lax():
    ours, theirs = (list(inspect.signature(f).parameters) for f in (ragged_dot, jax.lax.ragged_dot))
    assert ours[:6] == theirs[:6]
    args = (*problem(jnp.bfloat16)[:2], int32(SIZES), "highest", jnp.float32, None)
    np.testing.assert_allclose(
        ragged_dot(*args), jax.lax.ragged_dot(*args), rtol=1e-6, atol=1e-6, strict=True
    )


@pytest.mark.parametrize(
    "dtypes, preferred",
    [((jnp.bfloat16, jnp.float16), None), ((jnp.float32, jnp.bfloat16), jnp.bfloat16)],
)
def test_mixed_operands_without_fp8(dtypes, preferred):
    lhs, rhs = (x.astype(dtype) for x, dtype in zip(problem()[:2], dtypes, strict=True))
    out_dtype = preferred or jnp.float32
    dout = problem(out_dtype)[2]
    found = jitted(preferred_element_type=preferred, recipe=BF16)(lhs, rhs, int32(SIZES), dout)
    lhs, rhs, dout = (x.astype(jnp.float32) for x in (lhs, rhs, dout))
    expected = jitted(recipe=BF16)(lhs, rhs, int32(SIZES), dout)
    for x, y, dtype in zip(found, expected, (out_dtype, *dtypes), strict=True):
        assert_close(x, np.asarray(y, np.float64), dtype)


def test_numpy_operands():
    lhs, rhs, _ = problem()
    found = ragged_dot(np.asarray(lhs), np.asarray(rhs), np.asarray(SIZES))
    np.testing.assert_array_equal(found, ragged_dot(lhs, rhs, int32(SIZES)))


# ScaledArray rhs


@pytest.mark.parametrize("with_transpose, offset", [(True, None), (False, [1])])
def test_scaled_rhs_gives_the_same_result_and_dlhs(with_transpose, offset):
    lhs, rhs, dout = problem()
    sizes = int32(SIZES if offset is None else MORE_SIZES)
    offset = None if offset is None else int32(offset)
    scaled = quantize(rhs, block=(128, 128), with_transpose=with_transpose)

    @jax.jit
    def with_scaled(lhs, scaled, sizes, dout):
        product = lambda lhs: ragged_dot(lhs, scaled, sizes, group_offset=offset)
        out, pullback = jax.vjp(product, lhs)
        return out, *pullback(dout)

    expected_out, expected_dlhs, _ = jitted()(lhs, rhs, sizes, dout, offset)
    assert_all_same_bits(with_scaled(lhs, scaled, sizes, dout), (expected_out, expected_dlhs))


def test_scaled_rhs_without_fp8():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128))
    found = ragged_dot(lhs, scaled, int32(SIZES), "highest")
    exact = jax.lax.ragged_dot(lhs, scaled.dequantize(), int32(SIZES))
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_gradient_of_a_scaled_rhs_raises():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128))
    loss = lambda scaled: ragged_dot(lhs, scaled, int32(SIZES)).sum()
    with raises(TypeError, match="ragged_dot: a ScaledArray rhs has no gradient; got one among"):
        jax.grad(loss, allow_int=True)(scaled)


# Errors

LHS, RHS, GROUPS = jnp.ones((2, 3)), jnp.ones((4, 3, 5)), int32(SIZES)
BAD_SCALE = ScaledArray(quantize(RHS).values, LHS, None, (128, 128))
OFFSET = dict(group_offset=int32([1]))
BAD_CALLS = [
    (LHS, jnp.ones((4, 6, 5)), GROUPS, {}, TypeError,
     r"lhs and rhs must share k; got k=3 in lhs f32\[2,3\], k=6 in rhs f32\[4,6,5\]"),
    (LHS.astype(int), RHS.astype(int), GROUPS, {}, TypeError,
     r"lhs must be bf16.*got lhs s32\[2,3\]"),
    (LHS, RHS.astype(jnp.float8_e4m3fn), GROUPS, {}, TypeError,
     r"rhs must be bf16, f16 or f32; got rhs f8e4m3fn\[4,3,5\]. Quantised .* ScaledArray"),
    (quantize(LHS), RHS, GROUPS, {}, TypeError,
     r"lhs must be an array; got a ScaledArray f8e4m3fn\[2,3\]. ragged_dot quantises lhs itself: "
     "pass the array from before quantize."),
    (LHS[None], RHS, GROUPS, {}, TypeError, r"lhs must be \(m, k\); got lhs f32\[1,2,3\].*vmap"),
    (LHS, RHS[0], GROUPS, {}, TypeError, r"rhs must be \(g, k, n\); got rhs f32\[3,5\]"),
    (LHS, 2.0, GROUPS, {}, TypeError, "rhs must be an array; got float. Or pass a ScaledArray"),
    (LHS, quantize(RHS), GROUPS, {}, ValueError, r"rhs.block must be \(128, 128\), .*got \(1,"),
    (LHS, BAD_SCALE, GROUPS, {}, ValueError, r"rhs_scale must be f32\[4,1,1\]"),
    (LHS, RHS, GROUPS[1:], {}, TypeError,
     r"group_sizes must have one size for each of the 4 groups of rhs; got group_sizes s32\[3\]"),
    (LHS, RHS, GROUPS[None], {}, TypeError, r"group_sizes must be \(g,\); got .* s32\[1,4\]"),
    (LHS, RHS, RHS[:, 0, 0], {}, TypeError, r"group_sizes must be integers; got .* f32\[4\]"),
    (LHS, RHS, list(SIZES), {}, TypeError, "group_sizes must be an array; got list"),
    (LHS, RHS[:0], GROUPS[:0], {}, ValueError, "group_sizes must have 1 to 1024 groups"),
    (LHS, jnp.ones((1025, 3, 5)), int32([1] * 1025), {}, ValueError,
     r"group_sizes must have 1 to 1024 groups; got group_sizes s32\[1025\]"),
    (LHS, RHS, GROUPS, dict(group_offset=int32(1)), ValueError,
     r"group_offset must be an integer \(1,\); got group_offset s32\[\]"),
    (LHS, RHS, GROUPS, dict(group_offset=jnp.ones((1,))), ValueError,
     r"group_offset must be an integer \(1,\); got group_offset f32\[1\]"),
    (LHS, RHS, GROUPS, dict(group_offset=1), TypeError, "group_offset must be an array; got int"),
    (LHS, RHS, GROUPS[1:], OFFSET, ValueError,
     r"group_sizes must have at least the 4 groups of rhs; got group_sizes s32\[3\]"),
    (LHS, RHS, GROUPS, dict(preferred_element_type=jnp.int32), TypeError,
     "preferred_element_type must be bf16, f16 or f32; got s32"),
    (LHS, RHS, GROUPS, dict(precision="bf16"), ValueError,
     "precision must be .*; got 'bf16'. A recipe goes by its name: recipe=..."),
    (LHS, RHS, GROUPS, dict(recipe="fp8"), TypeError,
     "recipe must be .*Recipe, 'deepseek_v3', 'hybrid' or 'bf16'; got 'fp8'"),
    (LHS, RHS, GROUPS, dict(implementation="gpu"), ValueError,
     "implementation must be None, 'cuda', 'xla' or 'emulate'; got 'gpu'"),
    (LHS, RHS, GROUPS, dict(implementation="cuda", recipe=BF16), ValueError,
     "implementation='cuda' must go with an FP8 recipe and default precision"),
]  # fmt: skip


@pytest.mark.parametrize("lhs, rhs, sizes, kwargs, error, message", BAD_CALLS)
def test_bad_input_is_told_at_trace_time(lhs, rhs, sizes, kwargs, error, message):
    with raises(error, match="ragged_dot: " + message):
        ragged_dot(lhs, rhs, sizes, **kwargs)
