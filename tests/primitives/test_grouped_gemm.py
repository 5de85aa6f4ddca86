"""scaled_ragged_dot against float64 and a loop over the groups, and against each group alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import shapes
import undefined_rows
from assertions import SCALED_PRODUCT, assert_close, assert_exact
from errors import on_cpu, raises, raises_without_kernel
from grouped_cases import (
    BAD_SIZES,
    SIZES,
    SQUARE,
    any_sizes,
    assert_maps,
    int32,
    integers,
    normal,
    on_two_devices,
    patterns,
    powers,
    scaled,
    uniform,
    zeros,
)
from hypothesis import given, settings

from jax_fp8gemm import ScaledArray, quantize, scaled_matmul, scaled_ragged_dot
from jax_fp8gemm._primitives.grouped_gemm import grouped_gemm

dot_f32 = functools.partial(scaled_ragged_dot, out_dtype=jnp.float32)
jitted_dot = jax.jit(dot_f32)
jitted_from = jax.jit(functools.partial(grouped_gemm, out_dtype=jnp.float32))


def dot_operands(m, n, k, g, scales=powers):
    """Integers, whose products sum exactly in f32: all of it is exact with power-of-two scales."""
    lhs = scaled(integers(m, k), scales(m, reference.num_blocks(k)))
    rhs_scale = scales(g, reference.num_blocks(n), reference.num_blocks(k), seed=2)
    return lhs, scaled(integers(g, n, k, seed=1), rhs_scale, SQUARE)


def random_dot_operands(m, n, k, g, lhs_dtype=jnp.float8_e4m3fn):
    lhs, rhs = jnp.asarray(normal(m, k)), jnp.asarray(normal(g, n, k, seed=1))
    return quantize(lhs, dtype=lhs_dtype), quantize(rhs, block=SQUARE)


def dot_truth(lhs, rhs, sizes, first_row=0):
    return reference.grouped_gemm(lhs.values, lhs.scale, rhs.values, rhs.scale, sizes, first_row)


def rows_of(x, rows):
    """Some of the rows (or groups) of a ScaledArray, with their scales."""
    return ScaledArray(x.values[rows], x.scale[rows], None, x.block)


def test_against_float64():
    m, sizes = shapes.GROUPS["around a tile"]
    lhs, rhs = random_dot_operands(m, 136, 300, len(sizes))
    out = dot_f32(lhs, rhs, int32(sizes))
    assert_close(out, dot_truth(lhs, rhs, sizes), jnp.float32, SCALED_PRODUCT)


def test_of_mixed_formats_in_bf16_by_default():
    lhs, rhs = random_dot_operands(70, 130, 140, 3, lhs_dtype=jnp.float8_e5m2)
    sizes = (30, 0, 38)
    out = scaled_ragged_dot(lhs, rhs, int32(sizes))
    assert_close(out, dot_truth(lhs, rhs, sizes), jnp.bfloat16, SCALED_PRODUCT)
    rounded = dot_f32(lhs, rhs, int32(sizes)).astype(jnp.bfloat16)
    reference.assert_same_bits(out, rounded)


@patterns
def test_of_integers_is_exact(m, sizes):
    lhs, rhs = dot_operands(m, 136, 300, len(sizes))
    assert_exact(dot_f32(lhs, rhs, int32(sizes)), dot_truth(lhs, rhs, sizes))


def test_of_all_patterns_of_empty_groups():
    lhs, rhs = dot_operands(40, 24, 140, 8)
    for pattern in itertools.product((0, 1), repeat=8):
        sizes = np.array(pattern) * np.arange(1, 9)
        assert_exact(jitted_dot(lhs, rhs, int32(sizes)), dot_truth(lhs, rhs, sizes))


@given(sizes=any_sizes(8, 40))
@settings(max_examples=40, deadline=None)
def test_of_any_sizes(sizes):
    lhs, rhs = dot_operands(40, 24, 140, 8)
    assert_exact(jitted_dot(lhs, rhs, int32(sizes)), dot_truth(lhs, rhs, sizes))


def with_nan_rows(x, is_bad):
    """x with every value and every scale of some rows NaN."""
    values = np.array(x.values)
    values.view(np.uint8)[is_bad] = 0x7F
    scale = np.where(is_bad[..., None], np.float32(np.nan), x.scale)
    return ScaledArray(jnp.asarray(values), jnp.asarray(scale), None, x.block)


def test_of_nan_rows_of_no_group_is_zero():
    lhs, rhs = dot_operands(40, 24, 140, 3)
    bad = with_nan_rows(lhs, np.arange(40) >= 21)
    assert_exact(dot_f32(bad, rhs, int32((20, 0, 1))), dot_truth(lhs, rhs, (20, 0, 1)))


def test_a_nan_row_of_a_group_stays_its_own():
    lhs, rhs = dot_operands(40, 24, 140, 3)
    sizes, is_bad = (20, 0, 13), np.arange(40) == 5
    out = dot_f32(with_nan_rows(lhs, is_bad), rhs, int32(sizes))
    assert_exact(out, np.where(is_bad[:, None], np.nan, dot_truth(lhs, rhs, sizes)))


@pytest.mark.parametrize("first_row", [-1, 7, 39, 41])
def test_groups_after_a_first_row(first_row):
    lhs, rhs = dot_operands(40, 24, 140, 3)
    expected = dot_truth(lhs, rhs, (20, 0, 1), first_row)
    rows, start = np.arange(40), max(first_row, 0)
    bad = with_nan_rows(lhs, (rows < start) | (rows >= start + 21))
    out = jitted_from(bad, rhs, int32((20, 0, 1)), int32([first_row]))
    assert_exact(out, expected)


def test_each_group_has_the_bits_of_its_product_alone():
    # Sums within a block are exact; those over blocks, with these scales, round at every step.
    lhs, rhs = dot_operands(200, 136, 1000, 4, scales=uniform)
    sizes = (64, 0, 130, 1)
    kwargs = dict(out_dtype=jnp.float32, implementation="xla")
    out = scaled_ragged_dot(lhs, rhs, int32(sizes), **kwargs)
    for i, (start, end) in enumerate(reference.row_ranges(sizes, 200)):
        alone = scaled_matmul(rows_of(lhs, slice(start, end)), rows_of(rhs, i), **kwargs)
        reference.assert_same_bits(out[start:end], alone)


def test_permuting_the_groups_permutes_the_result():
    lhs, rhs = dot_operands(200, 24, 300, 5, scales=uniform)
    sizes, order = np.array((63, 0, 65, 1, 70)), [3, 0, 4, 2, 1]
    ranges = reference.row_ranges(sizes, 200)
    rows = np.concatenate([np.arange(*ranges[i]) for i in order] + [[199]])  # 199: of no group
    out = jitted_dot(lhs, rhs, int32(sizes))
    permuted = jitted_dot(rows_of(lhs, rows), rows_of(rhs, np.array(order)), int32(sizes[order]))
    reference.assert_same_bits(permuted, np.asarray(out)[rows])


def masked(m, g, n=24, k=140):
    """Operands of the masked form: lhs (g, m, k), rhs (g, n, k)."""
    lhs, rhs = dot_operands(g * m, n, k, g)
    return jax.tree.map(lambda x: x.reshape(g, m, *x.shape[1:]), lhs), rhs


def masked_truth(lhs, rhs, sizes):
    one = lambda i: dot_truth(rows_of(lhs, i), rows_of(rhs, slice(i, i + 1)), sizes[i : i + 1])
    return np.stack([one(i) for i in range(len(sizes))])


@pytest.mark.parametrize("m, sizes", [(9, (4,)), (130, (130, 0, 1)), (0, (1, 0))])
def test_masked_form(m, sizes):
    lhs, rhs = masked(m, len(sizes))
    assert_exact(jitted_dot(lhs, rhs, int32(sizes)), masked_truth(lhs, rhs, sizes))


@given(sizes=any_sizes(4, 10))
@settings(max_examples=40, deadline=None)
def test_masked_form_of_any_sizes_with_nan_in_the_masked_rows(sizes):
    lhs, rhs = masked(9, 4)
    bad = with_nan_rows(lhs, np.arange(9) >= np.asarray(sizes)[:, None])
    assert_exact(jitted_dot(bad, rhs, int32(sizes)), masked_truth(lhs, rhs, sizes))


def test_masked_form_whose_unused_rows_may_hold_anything():
    lhs, rhs = masked(9, 3)
    dot = jax.jit(
        functools.partial(scaled_ragged_dot, out_dtype=jnp.float32, unused_rows="undefined")
    )
    sizes = (4, 0, 9)
    found, truth = dot(lhs, rhs, int32(sizes)), masked_truth(lhs, rhs, sizes)
    is_valid = np.arange(9) < np.asarray(sizes)[:, None]
    assert_exact(np.asarray(found)[is_valid], truth[is_valid])


def test_public_results_of_groups_that_follow_each_other_are_always_zero_in_unused_rows():
    lhs, rhs = dot_operands(9, 24, 140, 3)
    with pytest.raises(ValueError, match="scaled_ragged_dot: unused_rows='undefined' must go with"):
        scaled_ragged_dot(lhs, rhs, int32((1, 2, 3)), unused_rows="undefined")


@pytest.mark.parametrize(
    "operands, expected_rows, clears",
    [
        (dot_operands(9, 24, 140, 3), None, 1),
        (masked(9, 3), None, 2),
        (masked(161, 3), None, 1),
        (masked(161, 3), 160, 1),
        (masked(161, 3), 159, 2),
    ],
)
def test_zero_rows_are_cleared_where_that_costs_least(operands, expected_rows, clears):
    """What the lowered call says to the launch code: 1 by the kernel, 2 by a fill, 0 not at all."""
    first_row = jnp.zeros((1,), jnp.int32)
    for unused, expected in (("zero", clears), ("undefined", 0)):
        how = dict(unused_rows=unused, expected_rows=expected_rows, out_dtype=jnp.float32)
        dot = jax.jit(functools.partial(grouped_gemm, **how))
        traced = dot.trace(*operands, int32((1, 2, 3)), first_row)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert f"clears_unused = {expected} : i32" in text


@pytest.mark.parametrize("implementation", ["xla", "emulate"])
def test_undefined_rows_of_groups_that_follow_each_other_under_vmap(monkeypatch, implementation):
    """Of each element the rows of no group alone, before the first group and after the last."""
    undefined_rows.poison(monkeypatch)
    lhs, rhs = dot_operands(40, 24, 140, 3)
    starts = 0, 3, 50
    how = dict(out_dtype=jnp.float32, implementation=implementation)
    run = jax.jit(jax.vmap(lambda *of: grouped_gemm(lhs, rhs, *of, unused_rows="undefined", **how)))
    found = np.asarray(run(int32(SIZES), int32(starts)[:, None]))
    for out, sizes, first_row in zip(found, SIZES, starts, strict=True):
        is_used = np.zeros(40, bool)
        for start, end in reference.row_ranges(sizes, 40, first_row):
            is_used[start:end] = True
        assert_exact(out[is_used], dot_truth(lhs, rhs, sizes, first_row)[is_used])
        assert np.isnan(out[~is_used]).all()


@pytest.mark.parametrize("m, n, k", [(0, 8, 140), (8, 0, 140), (8, 8, 0)])
def test_of_empty_extents(m, n, k):
    lhs, rhs = dot_operands(m, n, k, 3)
    out = scaled_ragged_dot(lhs, rhs, int32((1, 0, 5)))
    reference.assert_same_bits(out, np.zeros((m, n), jnp.bfloat16))


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)])
def test_vmap(in_axes):
    lhs, rhs = dot_operands(40, 24, 140, 3)
    roll = lambda x, i: rows_of(x, np.roll(np.arange(len(x.values)), i))
    elements = [(roll(lhs, i), roll(rhs, i), int32(SIZES[i])) for i in range(3)]
    assert_maps(dot_f32, in_axes, elements, dot_truth)


def test_scan_over_group_sizes():
    lhs, rhs = dot_operands(40, 24, 140, 3)
    step = lambda carry, sizes: (carry, dot_f32(lhs, rhs, sizes))
    _, out = jax.jit(lambda sizes: jax.lax.scan(step, None, sizes))(int32(SIZES))
    for i in range(3):
        assert_exact(out[i], dot_truth(lhs, rhs, SIZES[i]))


def test_export_round_trip():
    lhs, rhs = dot_operands(40, 24, 140, 3)
    exported = jax.export.export(jax.jit(lambda sizes: dot_f32(lhs, rhs, sizes)))(int32(SIZES[0]))
    again = jax.export.deserialize(exported.serialize())
    assert_exact(again.call(int32(SIZES[1])), dot_truth(lhs, rhs, SIZES[1]))


def test_inside_shard_map():
    lhs, rhs = dot_operands(80, 24, 140, 6)
    sizes = int32((20, 0, 13, 0, 41, 3))
    halves = [
        dot_truth(rows_of(lhs, rows), rows_of(rhs, groups), sizes[groups])
        for rows, groups in ((np.s_[:40], np.s_[:3]), (np.s_[40:], np.s_[3:]))
    ]
    assert_exact(on_two_devices(dot_f32)(lhs, rhs, sizes), np.concatenate(halves))


LHS, RHS = zeros(8, 256), zeros(3, 16, 256, block=SQUARE)
G3 = int32((1, 2, 3))


@pytest.mark.parametrize(
    "args, error, message",
    [
        (
            dict(rhs=zeros(3, 16, 128, block=SQUARE)),
            ValueError,
            r"lhs and rhs must share k; got k=256 in lhs f8e4m3fn\[8,256\], "
            r"k=128 in rhs f8e4m3fn\[3,16,128\]",
        ),
        (
            dict(group_sizes=int32((1, 2))),
            ValueError,
            r"group_sizes must have one size for each of the 3 groups of rhs; .* s32\[2\]",
        ),
        (
            dict(lhs=zeros(2, 8, 256)),
            ValueError,
            r"lhs \(g, max_m, k\) and rhs \(g, n, k\) must share g; "
            r"got lhs f8e4m3fn\[2,8,256\], rhs f8e4m3fn\[3,16,256\]",
        ),
        (dict(lhs=LHS.values), TypeError, r"lhs must be a ScaledArray; got f8e4m3fn\[8,256\]"),
        (
            dict(lhs=zeros(1, 2, 8, 256)),
            ValueError,
            r"lhs must be \(m, k\) or \(g, max_m, k\); got lhs f8e4m3fn\[1,2,8,256\]",
        ),
        (
            dict(rhs=zeros(16, 256, block=SQUARE)),
            ValueError,
            r"rhs must be \(g, n, k\); got rhs f8e4m3fn\[16,256\]",
        ),
        (
            dict(lhs=zeros(8, 256, block=SQUARE)),
            ValueError,
            r"lhs.block must be \(1, 128\); got \(128, 128\)",
        ),
        (
            dict(rhs=zeros(3, 16, 256)),
            ValueError,
            r"rhs.block must be \(128, 128\); got \(1, 128\)",
        ),
        *BAD_SIZES,
        (
            dict(rhs=zeros(1025, 1, 256, block=SQUARE), group_sizes=jnp.zeros(1025, jnp.int32)),
            ValueError,
            r"group_sizes must have 1 to 1024 groups; got group_sizes s32\[1025\]",
        ),
        (dict(out_dtype=jnp.float16), TypeError, "out_dtype must be bf16 or f32; got f16"),
        (dict(implementation="gpu"), ValueError, "None, 'cuda', 'xla' or 'emulate'; got 'gpu'"),
    ],
)
def test_bad_input_is_told_at_trace_time(args, error, message):
    args = dict(lhs=LHS, rhs=RHS, group_sizes=G3) | args
    with raises(error, match="scaled_ragged_dot: .*" + message):
        scaled_ragged_dot(**args)


@on_cpu
def test_cuda_implementation_raises_on_cpu():
    with raises_without_kernel("grouped_gemm"):
        scaled_ragged_dot(LHS, RHS, G3, implementation="cuda")


def test_is_not_differentiable():
    loss = lambda scale: dot_f32(ScaledArray(LHS.values, scale), RHS, G3).sum()
    with raises(NotImplementedError, match="grouped_gemm: matmul, .* are differentiable once"):
        jax.grad(loss)(LHS.scale)
