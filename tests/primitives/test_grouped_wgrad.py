"""scaled_ragged_wgrad against float64 and a loop over the groups, and against each group alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import shapes
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
    powers,
    zeros,
)
from hypothesis import given, settings

from jax_fp8gemm import ScaledArray, quantize, quantize_ragged, scaled_matmul, scaled_ragged_wgrad

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def wgrad(lhs, rhs, sizes, pow2_scale=False, **kwargs):
    """The product of lhs (m, a) and rhs (m, b), both quantised along the tokens of each group."""
    columns = [quantize_ragged(x, sizes, pow2_scale=pow2_scale) for x in (lhs, rhs)]
    return scaled_ragged_wgrad(*columns, sizes, **kwargs)


jitted_wgrad = jax.jit(functools.partial(wgrad, implementation="xla"))
# Small integers with power-of-two scales lose nothing.
exact_wgrad = jax.jit(functools.partial(wgrad, pow2_scale=True))


def wgrad_operands(m, a=40, b=24):
    """Integers, each column of its own magnitude."""
    return (
        jnp.asarray(integers(m, a) * powers(a)),
        jnp.asarray(integers(m, b, seed=1) * powers(b, seed=2)),
    )


def exact_truth(lhs, rhs, sizes):
    ranges = reference.row_ranges(sizes, len(lhs))
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    return np.stack([lhs[start:end].T @ rhs[start:end] for start, end in ranges])


def test_against_float64():
    m, sizes = shapes.GROUPS["around a tile"]
    lhs, rhs = normal(m, 40), normal(m, 136, seed=1)
    out = wgrad(jnp.asarray(lhs), jnp.asarray(rhs), int32(sizes))
    assert_close(out, reference.grouped_wgrad(lhs, rhs, sizes), jnp.float32, SCALED_PRODUCT)


@pytest.mark.parametrize("name", ["one group", "empty groups first, between and last"])
def test_of_integers_is_exact(name):
    m, sizes = shapes.GROUPS[name]
    lhs, rhs = wgrad_operands(m)
    assert_exact(exact_wgrad(lhs, rhs, int32(sizes)), exact_truth(lhs, rhs, sizes))


def test_of_mixed_formats_in_bf16():
    lhs, rhs, sizes = normal(200, 40), normal(200, 24, seed=1), (130, 0, 60)
    columns = (
        quantize_ragged(jnp.asarray(lhs), int32(sizes), dtype=E4M3),
        quantize_ragged(jnp.asarray(rhs), int32(sizes), dtype=E5M2),
    )
    out = scaled_ragged_wgrad(*columns, int32(sizes), out_dtype=jnp.bfloat16)
    assert_close(
        out, reference.grouped_wgrad(lhs, rhs, sizes, E4M3, E5M2), jnp.bfloat16, SCALED_PRODUCT
    )
    rounded = scaled_ragged_wgrad(*columns, int32(sizes)).astype(jnp.bfloat16)
    reference.assert_same_bits(out, rounded)


def test_of_all_patterns_of_empty_groups():
    lhs, rhs = wgrad_operands(300, 8, 8)
    for pattern in itertools.product((0, 1), repeat=8):
        sizes = np.array(pattern) * (1, 2, 3, 4, 129, 5, 6, 140)
        assert_exact(exact_wgrad(lhs, rhs, int32(sizes)), exact_truth(lhs, rhs, sizes))


@given(sizes=any_sizes(8, 300))
@settings(max_examples=40, deadline=None)
def test_of_any_sizes(sizes):
    lhs, rhs = wgrad_operands(300, 8, 8)
    assert_exact(exact_wgrad(lhs, rhs, int32(sizes)), exact_truth(lhs, rhs, sizes))


def test_accumulates_into_a_donated_buffer():
    lhs, rhs = wgrad_operands(200)
    sizes, accum = (130, 0, 60), integers(3, 40, 24, seed=3)
    add = jax.jit(functools.partial(wgrad, pow2_scale=True), donate_argnames="accumulate_into")
    donated = jnp.array(accum)
    out = add(lhs, rhs, int32(sizes), accumulate_into=donated)
    np.testing.assert_array_equal(out, exact_truth(lhs, rhs, sizes) + accum)
    reference.assert_same_bits(out[1], accum[1])
    assert donated.is_deleted()


def test_each_group_has_the_bits_of_its_product_alone():
    lhs, rhs, sizes = normal(140, 40), normal(140, 24, seed=1), (129, 0, 3)
    out = jitted_wgrad(jnp.asarray(lhs), jnp.asarray(rhs), int32(sizes))
    for i, (start, end) in enumerate(reference.row_ranges(sizes, 140)):
        alone = [quantize(jnp.asarray(x[start:end]), axis=-2) for x in (lhs, rhs)]
        expected = scaled_matmul(*alone, out_dtype=jnp.float32, implementation="xla")
        reference.assert_same_bits(out[i], expected)


def test_permuting_the_groups_permutes_the_result():
    lhs, rhs = normal(140, 40), normal(140, 24, seed=1)
    sizes, order = np.array((129, 1, 9)), [2, 0, 1]
    ranges = reference.row_ranges(sizes, 140)
    rows = np.concatenate([np.arange(*ranges[i]) for i in order] + [[139]])  # 139: of no group
    out = jitted_wgrad(jnp.asarray(lhs), jnp.asarray(rhs), int32(sizes))
    permuted = jitted_wgrad(jnp.asarray(lhs[rows]), jnp.asarray(rhs[rows]), int32(sizes[order]))
    reference.assert_same_bits(permuted, np.asarray(out)[order])


def test_nan_stays_in_its_group_and_column():
    lhs, rhs = wgrad_operands(300, 8, 8)
    sizes = (130, 0, 60, 3, 4, 5, 6, 7)
    expected = exact_truth(lhs, rhs, sizes)
    expected[0, 7] = expected[2, :, 5] = np.nan
    lhs, rhs = lhs.at[3, 7].set(np.nan), rhs.at[189, 5].set(np.inf)
    lhs = lhs.at[215:].set(np.nan)  # rows of no group
    assert_exact(exact_wgrad(lhs, rhs, int32(sizes)), expected)


@pytest.mark.parametrize("a, b", [(0, 8), (8, 0)])
def test_of_empty_extents(a, b):
    lhs, rhs = wgrad_operands(8, a, b)
    assert_exact(exact_wgrad(lhs, rhs, int32((1, 0, 5))), np.zeros((3, a, b)))


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, None, 0), (0, 0, 0)])
def test_vmap(in_axes):
    lhs, rhs = wgrad_operands(40)
    elements = [(jnp.roll(lhs, i, 0), jnp.roll(rhs, 2 * i, 0), int32(SIZES[i])) for i in range(3)]
    assert_maps(exact_wgrad, in_axes, elements, exact_truth)


def test_vmap_over_the_accumulator_alone():
    lhs, rhs = wgrad_operands(40)
    accum = integers(3, 40, 24, 2, seed=3)
    add = lambda accum: wgrad(lhs, rhs, int32(SIZES[0]), True, accumulate_into=accum)
    out = jax.vmap(add, in_axes=3)(jnp.asarray(accum))
    expected = exact_truth(lhs, rhs, SIZES[0]) + np.moveaxis(accum, 3, 0)
    np.testing.assert_array_equal(out, expected)


def test_scan_accumulates():
    lhs, rhs = wgrad_operands(40)
    add = lambda accum, sizes: (wgrad(lhs, rhs, sizes, True, accumulate_into=accum), None)
    out, _ = jax.lax.scan(add, jnp.zeros((3, 40, 24)), int32(SIZES))
    assert_exact(out, sum(exact_truth(lhs, rhs, sizes) for sizes in SIZES))


def test_of_int64_sizes():
    lhs, rhs = wgrad_operands(40)
    sizes = np.array((20, -(2**40), 2**40, 5))
    with jax.enable_x64(True):
        out = exact_wgrad(lhs, rhs, jnp.asarray(sizes))
    assert out.dtype == jnp.float32
    assert_exact(out, exact_truth(lhs, rhs, sizes))


def test_export_round_trip():
    lhs, rhs = wgrad_operands(40)
    exported = jax.export.export(exact_wgrad)(lhs, rhs, int32(SIZES[0]))
    again = jax.export.deserialize(exported.serialize())
    assert_exact(again.call(lhs, rhs, int32(SIZES[1])), exact_truth(lhs, rhs, SIZES[1]))


def test_inside_shard_map():
    lhs, rhs = wgrad_operands(80)
    sizes = int32((20, 0, 13, 0, 41, 3))
    halves = [
        exact_truth(lhs[rows], rhs[rows], sizes[groups])
        for rows, groups in ((np.s_[:40], np.s_[:3]), (np.s_[40:], np.s_[3:]))
    ]
    assert_exact(on_two_devices(exact_wgrad)(lhs, rhs, sizes), np.concatenate(halves))


COLUMNS = zeros(8, 256)
G3 = int32((1, 2, 3))


@pytest.mark.parametrize(
    "args, error, message",
    [
        (
            dict(rhs=zeros(8, 384)),
            ValueError,
            r"must share k; got k=256 in lhs f8e4m3fn\[8,256\], k=384 in rhs f8e4m3fn\[8,384\]",
        ),
        (dict(rhs=COLUMNS.values), TypeError, r"rhs must be a ScaledArray; got f8e4m3fn"),
        (dict(lhs=zeros(1, 8, 256)), ValueError, r"lhs must be \(m, t\); got lhs .*\[1,8,256\]"),
        (dict(rhs=zeros(1, 8, 256)), ValueError, r"rhs must be \(n, t\); got rhs .*\[1,8,256\]"),
        (
            dict(rhs=zeros(8, 256, block=SQUARE)),
            ValueError,
            r"rhs.block must be \(1, 128\); got \(128, 128\)",
        ),
        *BAD_SIZES,
        (
            dict(group_sizes=jnp.zeros(1025, jnp.int32)),
            ValueError,
            r"group_sizes must have 1 to 1024 groups; got group_sizes s32\[1025\]",
        ),
        (dict(out_dtype=jnp.float16), TypeError, "out_dtype must be bf16 or f32; got f16"),
        (
            dict(accumulate_into=jnp.ones((2, 8, 8))),
            ValueError,
            r"accumulate_into must be f32\[3,8,8\]; got f32\[2,8,8\]",
        ),
        (
            dict(accumulate_into=jnp.ones((3, 8, 8)), out_dtype=jnp.bfloat16),
            ValueError,
            "accumulate_into must go with out_dtype float32; got out_dtype bf16",
        ),
        (dict(implementation="gpu"), ValueError, "None, 'cuda', 'xla' or 'emulate'; got 'gpu'"),
    ],
)
def test_bad_input_is_told_at_trace_time(args, error, message):
    args = dict(lhs=COLUMNS, rhs=COLUMNS, group_sizes=G3) | args
    with raises(error, match="scaled_ragged_wgrad: .*" + message):
        scaled_ragged_wgrad(**args)


@on_cpu
def test_cuda_implementation_raises_on_cpu():
    with raises_without_kernel("grouped_wgrad"):
        scaled_ragged_wgrad(COLUMNS, COLUMNS, G3, implementation="cuda")


def test_is_not_differentiable():
    columns = lambda scale: ScaledArray(COLUMNS.values, scale)
    loss = lambda scale: scaled_ragged_wgrad(columns(scale), COLUMNS, G3).sum()
    with raises(NotImplementedError, match="grouped_wgrad: matmul, .* are differentiable once"):
        jax.grad(loss)(COLUMNS.scale)
