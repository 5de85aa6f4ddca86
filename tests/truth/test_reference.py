"""The reference against definitions worked out another way: by exhaustive search and by hand."""

import ml_dtypes
import numpy as np
import pytest
import reference
from reference import E4M3, E5M2, FORMAT_MAX

FORMATS = (E4M3, E5M2)
fmt_param = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def _grid(fmt):
    """Every finite non-negative value of fmt, ascending, and whether its mantissa is even."""
    codes = np.arange(0x80, dtype=np.uint8)
    values = codes.view(fmt).astype(np.float64)
    keep = np.isfinite(values)
    return values[keep], (codes[keep] & 1) == 0


def _nearest(y, fmt):
    """Round to nearest even, saturating, by searching the whole grid in float64."""
    values, even = _grid(fmt)
    upper = np.clip(np.searchsorted(values, np.abs(y)), 1, len(values) - 1)
    low, high = values[upper - 1], values[upper]
    to_low, to_high = np.abs(y) - low, high - np.abs(y)
    pick_high = (to_high < to_low) | ((to_high == to_low) & even[upper])
    return np.copysign(np.where(pick_high, high, low), y)


@fmt_param
def test_values_are_the_nearest_on_the_grid(fmt):
    """amax = FMAX makes the scale 1, so values are roundings of x itself; midpoints included."""
    grid, _ = _grid(fmt)
    midpoints = (grid[1:] + grid[:-1]) / 2
    rng = np.random.default_rng(0)
    random = np.exp2(rng.uniform(-20, np.log2(FORMAT_MAX[fmt]), 4096))
    near = [np.nextafter(midpoints.astype(np.float32), to) for to in (0, 1e9)]
    x = np.concatenate([grid, midpoints, *near, random])
    x = np.concatenate([x, -x]).astype(np.float32)
    x = np.pad(x, (0, -len(x) % 127)).reshape(-1, 127)
    x = np.concatenate([x, np.full((len(x), 1), FORMAT_MAX[fmt], np.float32)], axis=1)
    values, scale = reference.quantize(x, fmt=fmt)
    np.testing.assert_array_equal(scale, np.float32(1))
    expected = _nearest(x.astype(np.float64), fmt)
    np.testing.assert_array_equal(values.astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(values.astype(np.float32)), np.signbit(x))


@fmt_param
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
def test_scale_is_amax_over_format_max(fmt, block):
    """Block by block, in a loop; ragged edges; the largest element maps to the largest value."""
    x = np.random.default_rng(1).normal(size=(130, 300)).astype(np.float32)
    values, scale = reference.quantize(x, block, fmt=fmt)
    assert values.shape == x.shape and values.dtype == fmt
    assert scale.shape == (-(-130 // block[0]), 3) and scale.dtype == np.float32
    for i in range(scale.shape[0]):
        for j in range(3):
            tile = np.s_[i * block[0] : (i + 1) * block[0], j * 128 : (j + 1) * 128]
            assert scale[i, j] == np.abs(x[tile]).max() / np.float32(FORMAT_MAX[fmt])
            assert np.abs(values[tile].astype(np.float32)).max() == FORMAT_MAX[fmt]


@fmt_param
def test_power_of_two_scale_is_the_smallest_that_does_not_saturate(fmt):
    x = np.random.default_rng(2).normal(size=(64, 256)).astype(np.float32)
    x[0, :128] = 0.0
    x[0, 5] = np.float32(FORMAT_MAX[fmt]) / 4  # the scale is a power of two before rounding
    values, scale = reference.quantize(x, fmt=fmt, pow2=True)
    mantissa, _ = np.frexp(scale)
    np.testing.assert_array_equal(mantissa, 0.5)
    assert scale[0, 0] == 0.25
    plain = np.abs(x.reshape(64, 2, 128)).max(-1).astype(np.float64) / FORMAT_MAX[fmt]
    assert np.all((scale >= plain) & (scale < 2 * plain))
    exact = reference.dequantize(values, scale)
    np.testing.assert_array_equal(exact, exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_column_blocks_are_rows_of_the_transpose(dtype):
    x = np.random.default_rng(3).normal(size=(200, 72)).astype(dtype)
    values, scale = reference.quantize(x, axis=-2)
    assert values.shape == (72, 200) and scale.shape == (72, 2)
    for actual, expected in zip((values, scale), reference.quantize(x.T.copy()), strict=True):
        reference.assert_same_bits(actual, expected)


@fmt_param
def test_zero_block_has_a_finite_scale(fmt):
    values, scale = reference.quantize(np.zeros((2, 130), np.float32), fmt=fmt)
    np.testing.assert_array_equal(values.view(np.uint8), 0)
    np.testing.assert_array_equal(scale, np.float32(2.0**-92) / np.float32(FORMAT_MAX[fmt]))


@fmt_param
def test_denormals_become_signed_zeros(fmt):
    x = np.array([[2.0**-126, -(2.0**-127), 2.0**-149, -0.0, 0.0]], np.float32)
    values, _ = reference.quantize(x, fmt=fmt)
    np.testing.assert_array_equal(values.view(np.uint8), [[0, 0x80, 0, 0x80, 0]])


@fmt_param
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
def test_inf_or_nan_makes_its_block_nan_and_no_other(fmt, bad, block):
    x = np.ones((129, 140), np.float32)
    x[2, 130] = bad
    values, scale = reference.quantize(x, block, fmt=fmt)
    is_bad = np.zeros_like(x, bool)
    is_bad[2 if block[0] == 1 else slice(0, 128), 128:] = True
    np.testing.assert_array_equal(values.view(np.uint8) == 0x7F, is_bad)
    bad_scale = np.zeros_like(scale, bool)
    bad_scale[2 if block[0] == 1 else 0, 1] = True
    np.testing.assert_array_equal(scale.view(np.uint32) == 0x7FC00000, bad_scale)


def test_extremes_of_f32_saturate_and_stay_finite():
    big = np.finfo(np.float32).max
    x = np.array([[big, -big, 1.0, 2.0**-60]], np.float32)
    for pow2 in (False, True):
        values, scale = reference.quantize(x, pow2=pow2)
        assert np.isfinite(scale).all() and np.isfinite(values.astype(np.float32)).all()


def test_batch_dimensions_are_independent():
    x = np.random.default_rng(4).normal(size=(3, 130, 200)).astype(np.float32)
    for block, axis in (((1, 128), -1), ((1, 128), -2), ((128, 128), -1)):
        values, scale = reference.quantize(x, block, axis)
        for i in range(3):
            one_values, one_scale = reference.quantize(x[i], block, axis)
            reference.assert_same_bits(values[i], one_values)
            reference.assert_same_bits(scale[i], one_scale)


@pytest.mark.parametrize("rhs_block", [(128, 128), (1, 128)], ids=["1d2d", "1d1d"])
def test_gemm_is_the_sum_over_scale_blocks(rhs_block):
    """Against the formula with scales outside the products, element by element."""
    rng = np.random.default_rng(5)
    m, n, k = 3, 130, 300
    lhs, lhs_scale = reference.quantize(rng.normal(size=(m, k)).astype(np.float32))
    rhs, rhs_scale = reference.quantize(rng.normal(size=(n, k)).astype(np.float32), rhs_block)
    accum = rng.normal(size=(m, n)).astype(np.float32)
    out = reference.gemm(lhs, lhs_scale, rhs, rhs_scale, accum)
    for i, j in ((0, 0), (2, 127), (1, 128), (2, 129)):
        total = float(accum[i, j])
        for b in range(3):
            span = np.s_[b * 128 : (b + 1) * 128]
            product = lhs[i, span].astype(np.float64) @ rhs[j, span].astype(np.float64)
            total += float(lhs_scale[i, b]) * float(rhs_scale[j // rhs_block[0], b]) * product
        np.testing.assert_allclose(out[i, j], total, rtol=1e-13)


def test_matmul_vjp_is_exact_on_exactly_representable_operands():
    """Integers up to 7 = 448 / 64, the amax of every block: quantisation loses nothing."""
    rng = np.random.default_rng(6)
    sizes = ((256, 128), (128, 256), (256, 256))
    lhs, rhs, dout = (rng.integers(-7, 8, size).astype(np.float32) for size in sizes)
    for x in (lhs, rhs, dout):
        x[::128, :] = x[:, ::128] = 7.0
    out, dlhs, drhs = reference.matmul_vjp(lhs, rhs, dout)
    np.testing.assert_array_equal(out, lhs.astype(np.float64) @ rhs)
    np.testing.assert_array_equal(dlhs, dout.astype(np.float64) @ rhs.T)
    np.testing.assert_array_equal(drhs, lhs.T.astype(np.float64) @ dout)


def test_calc_diff_measures_relative_energy():
    x = np.random.default_rng(7).normal(size=1000)
    assert reference.calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    assert reference.calc_diff(x, -x) == pytest.approx(2)
    assert reference.calc_diff(x, 2 * x) == pytest.approx(0.2)
    assert reference.calc_diff(np.zeros(3), np.zeros(3)) == 0
    assert np.isnan(reference.calc_diff(x, np.full_like(x, np.nan)))


def test_assert_same_bits_sees_signs_and_payloads():
    reference.assert_same_bits(np.float32([np.nan]), np.float32([np.nan]))
    with pytest.raises(AssertionError, match="1 of 2 elements differ; first at \\(1,\\)"):
        reference.assert_same_bits(np.float32([0.0, -0.0]), np.float32([0.0, 0.0]))
    with pytest.raises(AssertionError):
        reference.assert_same_bits(np.zeros(2, np.float32), np.zeros(2, np.int32))
