"""The bit model against exact rational arithmetic and against what each of its rules must do."""

from fractions import Fraction

import bit_model
import ml_dtypes
import numpy as np
import pytest
import reference
from bit_model import E4M3, E5M2, Rule

FORMAT_PAIRS = tuple(bit_model.RULES)
ONE = np.ones((1, 1), np.float32)


def _fraction(x) -> Fraction:
    return Fraction(float(x))


def _round_to_f32(x: Fraction) -> np.float32:
    """Nearest even, by comparing the neighbours of an approximation."""
    near = np.float32(float(x))
    around = [np.nextafter(near, np.float32(to)) for to in (-np.inf, np.inf)]
    return min((near, *around), key=lambda c: (abs(_fraction(c) - x), int(c.view(np.uint32)) & 1))


def _floor_log2(x: Fraction) -> int:
    bits = x.numerator.bit_length() - x.denominator.bit_length()
    return bits if x >= Fraction(2) ** bits else bits - 1


def _toward_zero(x: Fraction, unit: Fraction) -> Fraction:
    return int(x / unit) * unit


def _operand_exponent(x) -> int:
    smallest = int(np.log2(float(ml_dtypes.finfo(x.dtype).smallest_normal)))
    return max(_floor_log2(abs(_fraction(x))), smallest)


def _accumulate_exactly(lhs, rhs) -> Fraction:
    """One k-block of one element, one term at a time in rational arithmetic."""
    accum = Fraction(0)
    for start in range(0, 128, 32):
        terms, exponents = [accum], []
        if accum:
            exponents.append(_floor_log2(abs(accum)))
        for a, b in zip(lhs[start : start + 32], rhs[start : start + 32], strict=True):
            if a != 0 and b != 0:
                terms.append(_fraction(a) * _fraction(b))
                exponents.append(_operand_exponent(a) + _operand_exponent(b))
        if exponents:
            unit = Fraction(2) ** (max(exponents) - 13)
            accum = sum((_toward_zero(term, unit) for term in terms), Fraction(0))
        if accum:
            accum = _toward_zero(accum, Fraction(2) ** (_floor_log2(abs(accum)) - 13))
    return accum


def _random_codes(rng, shape, fmt):
    """Finite codes, uniformly: every exponent, so most terms of a sum lose bits."""
    codes = np.arange(256, dtype=np.uint8)
    return rng.choice(codes[np.isfinite(codes.view(fmt).astype(np.float32))], shape).view(fmt)


def _block(pairs, fmt=E4M3):
    """(1, 1, 128) operands: the given (lhs, rhs) pairs at the given positions, zeros elsewhere."""
    lhs, rhs = np.zeros((1, 1, 128), np.float32), np.zeros((1, 1, 128), np.float32)
    for position, (a, b) in pairs.items():
        lhs[0, 0, position], rhs[0, 0, position] = a, b
    exact = lhs.astype(fmt), rhs.astype(fmt)
    for given, kept in zip((lhs, rhs), exact, strict=True):
        np.testing.assert_array_equal(given, kept.astype(np.float32))
    return exact


def _accumulate(pairs, rule=None) -> float:
    return float(bit_model.accumulate_blocks(*_block(pairs), rule or Rule())[0, 0])


# fma_f32


def test_fma_is_correctly_rounded():
    rng = np.random.default_rng(0)
    magnitudes = np.exp2(rng.integers(-20, 20, (3, 3000)))
    for a, b, c in (rng.normal(size=(3, 3000)) * magnitudes).astype(np.float32).T:
        expected = _round_to_f32(_fraction(a) * _fraction(b) + _fraction(c))
        assert bit_model.fma_f32(a, b, c) == expected, (a, b, c)


def test_fma_does_not_round_twice():
    """a * a = 1 + 2^-11 + 2^-24 is a tie in f32, which 2^-60 breaks: f64 cannot hold that sum."""
    a, c = np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    below, above = np.float32(1 + 2.0**-11), np.float32(1 + 2.0**-11 + 2.0**-23)
    assert np.float32(np.float64(a) * np.float64(a) + np.float64(c)) == below
    assert bit_model.fma_f32(a, a, 0) == below
    assert bit_model.fma_f32(a, a, c) == above
    assert bit_model.fma_f32(a, a, -c) == below
    assert bit_model.fma_f32(-a, a, -c) == -above


def test_fma_extremes():
    assert bit_model.fma_f32(0.0, -1.0, 0.0).view(np.uint32) == 0
    assert np.isnan(bit_model.fma_f32(np.nan, 0, 0))
    assert np.isinf(bit_model.fma_f32(2.0**100, 2.0**100, 0))
    assert bit_model.fma_f32(2.0**-100, 2.0**-49, 0) == np.float32(2.0**-149)
    assert bit_model.fma_f32(2.0**-100, 2.0**-50, 0) == 0  # a tie of the denormals, to even


# One k-block


@pytest.mark.parametrize("formats", FORMAT_PAIRS, ids=lambda f: f"{f[0].name}-{f[1].name}")
def test_accumulator_is_the_rule_in_rational_arithmetic(formats):
    rng = np.random.default_rng(1)
    lhs, rhs = (_random_codes(rng, (200, 1, 128), fmt) for fmt in formats)
    lhs.view(np.uint8)[:20, 0, ::2] &= 0x83  # mostly subnormals and zeros
    rhs.view(np.uint8)[20:40] &= 0x87
    lhs.view(np.uint8)[40:50] = 0
    actual = bit_model.accumulate_blocks(lhs, rhs, Rule())[:, 0]
    expected = [_accumulate_exactly(x[0], y[0]) for x, y in zip(lhs, rhs, strict=True)]
    assert [_fraction(x) for x in actual] == expected


def test_wide_and_narrow_arithmetic_agree():
    """Beyond 16 bits the model computes in f64; 16 fraction bits in f64 must equal them in f32."""
    rng = np.random.default_rng(2)
    lhs, rhs = (_random_codes(rng, (300, 2, 128), E4M3) for _ in range(2))
    narrow = bit_model.accumulate_blocks(lhs, rhs, Rule(fraction_bits=16, result_bits=16))
    products = lhs.astype(np.float64) * rhs.astype(np.float64)
    exact = products.sum(-1)
    assert np.abs(narrow - exact).max() <= 4 * 34 * 2.0 ** (17 - 16)
    wide = bit_model.accumulate_blocks(lhs, rhs, Rule(fraction_bits=50, result_bits=23))
    np.testing.assert_allclose(wide, exact, rtol=4 * 2.0**-23, atol=2.0**-5)


def test_small_integers_are_exact():
    rng = np.random.default_rng(3)
    lhs, rhs = (rng.integers(-7, 8, (16, 384)).astype(np.float32) for _ in range(2))
    scales = np.ones((16, 3), np.float32)
    out = bit_model.gemm(lhs.astype(E4M3), scales, rhs.astype(E4M3), scales)
    np.testing.assert_array_equal(out, lhs @ rhs.T)


def test_terms_far_below_the_largest_vanish_toward_zero():
    large = {0: (256.0, 32.0)}  # exponent 13: the unit is 1
    assert _accumulate(large | {1: (1.0, 1.0)}) == 8193
    assert _accumulate(large | {1: (0.75, 1.0)}) == 8192
    assert _accumulate(large | {1: (-0.75, 1.0)}) == 8192
    assert _accumulate(large | {i: (0.9375, 1.0) for i in range(1, 32)}) == 8192


def test_order_of_steps_matters_and_order_within_a_step_does_not():
    large, small = (256.0, 32.0), (0.5, 1.0)
    late = {0: large, 32: (-256.0, 32.0)} | {64 + i: small for i in range(8)}
    early = {64: large, 96: (-256.0, 32.0)} | {i: small for i in range(8)}
    lost = {0: large, 96: (-256.0, 32.0)} | {64 + i: small for i in range(8)}
    assert (_accumulate(late), _accumulate(early), _accumulate(lost)) == (4.0, 4.0, 0.0)
    rng = np.random.default_rng(4)
    lhs, rhs = (_random_codes(rng, (100, 1, 128), E4M3) for _ in range(2))
    plain = bit_model.accumulate_blocks(lhs, rhs, Rule())
    within = np.concatenate([s + rng.permutation(32) for s in range(0, 128, 32)])
    reference.assert_same_bits(
        bit_model.accumulate_blocks(lhs[..., within], rhs[..., within], Rule()), plain
    )
    across = bit_model.accumulate_blocks(lhs[..., ::-1], rhs[..., ::-1], Rule())
    assert np.mean(across != plain) > 0.3


def test_sum_keeps_fourteen_bits():
    # Integers up to 2^14 - 1 fit; from 2^14 on they count by 2, cut toward zero on either side.
    below = {0: (256.0, 32.0), 1: (240.0, 32.0), 2: (15.0, 30.0), 3: (13.0, 1.0)}
    assert _accumulate(below) == 16335
    above = {0: (256.0, 32.0), 1: (256.0, 32.0), 2: (5.0, 1.0)}
    assert _accumulate(above) == 16388
    assert _accumulate({i: (-a, b) for i, (a, b) in above.items()}) == -16388


def test_exponents_of_products_are_not_normalized():
    # 1.5 * 1.5 = 2.25 keeps exponent 0, so 2^-13 is still a unit.
    pairs = {0: (1.5, 1.5), 1: (2.0**-6, 2.0**-7)}
    assert _accumulate(pairs | {2: (-1.25, 1.0)}) == 1 + 2.0**-13
    assert _accumulate(pairs | {2: (-1.25, 1.0)}, Rule(normalized_products=True)) == 1.0


@pytest.mark.parametrize("fmt, bias", [(E4M3, -6.0e-4), (E5M2, -2.5e-4)], ids=str)
def test_sums_of_one_sign_are_too_small_on_average(fmt, bias):
    """The figures of docs/numerics.md: block sums of the magnitudes of normal numbers."""
    rng = np.random.default_rng(0)
    draw = lambda: np.abs(rng.standard_normal((4096, 128))).astype(np.float32)
    lhs, rhs = (reference.quantize(draw(), fmt=fmt)[0] for _ in range(2))
    exact = (lhs.astype(np.float64) * rhs.astype(np.float64)).sum(axis=1)
    sums = bit_model.accumulate_blocks(lhs[:, None], rhs[:, None], bit_model.RULES[fmt, fmt])[:, 0]
    errors = sums / exact - 1
    assert errors.max() <= 0
    # The figure has two digits; the mean of 4096 draws is known to 1 % of their deviation.
    assert abs(errors.mean() - bias) < 0.1e-4


def test_subnormals_count_with_the_smallest_normal_exponent():
    # 2^-9 * 2^8 = 2^-1 counts with exponent -6 + 8 = 2, which cuts at 2^-11.
    pairs = {0: (2.0**-9, 256.0), 1: (2.0**-6, 2.0**-6)}
    assert _accumulate(pairs) == 0.5
    assert _accumulate(pairs, Rule(normalized_products=True)) == 0.5 + 2.0**-12


def test_zeros_have_no_exponent():
    smallest = {0: (2.0**-9, 2.0**-9)}
    assert _accumulate(smallest | {1: (448.0, 0.0), 40: (0.0, 448.0)}) == 2.0**-18
    zeros = np.zeros((1, 2, 128), E4M3)
    reference.assert_same_bits(
        bit_model.accumulate_blocks(zeros, zeros, Rule()), np.zeros((1, 2), np.float32)
    )


def test_negated_operand_negates_the_accumulator():
    """Truncation is symmetric, unlike a shift of two's complement."""
    rng = np.random.default_rng(5)
    lhs, rhs = (_random_codes(rng, (500, 1, 128), E4M3) for _ in range(2))
    negated = (lhs.view(np.uint8) ^ 0x80).view(E4M3)
    np.testing.assert_array_equal(
        bit_model.accumulate_blocks(negated, rhs, Rule()),
        -bit_model.accumulate_blocks(lhs, rhs, Rule()),
    )


@pytest.mark.parametrize("fmt", (E4M3, E5M2), ids=lambda f: f.name)
def test_nan_stays_in_its_block(fmt):
    lhs, rhs = np.ones((1, 2, 128), fmt), np.ones((1, 2, 128), fmt)
    lhs.view(np.uint8)[0, 1, 77] = 0x7F
    rhs[0, 1, 77] = 0
    accums = bit_model.accumulate_blocks(lhs, rhs, Rule())
    assert accums[0, 0] == 128 and np.isnan(accums[0, 1])


# The whole element


def _case(seed, m, n, k, rhs_block, formats=(E4M3, E4M3)):
    rng = np.random.default_rng(seed)
    lhs = reference.quantize(rng.normal(size=(m, k)).astype(np.float32), fmt=formats[0])
    rhs = reference.quantize(rng.normal(size=(n, k)).astype(np.float32), rhs_block, fmt=formats[1])
    return *lhs, *rhs


@pytest.mark.parametrize("rhs_block", [(128, 128), (1, 128)], ids=["1d2d", "1d1d"])
@pytest.mark.parametrize("formats", FORMAT_PAIRS, ids=lambda f: f"{f[0].name}-{f[1].name}")
def test_close_to_float64(rhs_block, formats):
    """13 bits a step, toward zero: DeepGEMM's bound of 1e-5 on calc_diff holds with much room."""
    case = _case(6, 8, 160, 1000, rhs_block, formats)
    assert reference.calc_diff(bit_model.gemm(*case), reference.gemm(*case)) < 1e-7


@pytest.mark.parametrize("rhs_block", [(128, 128), (1, 128)], ids=["1d2d", "1d1d"])
def test_promotion_is_one_fma_a_block_ascending(rhs_block):
    lhs, lhs_scale, rhs, rhs_scale = _case(7, 4, 8, 384, rhs_block)
    out = bit_model.gemm(lhs, lhs_scale, rhs, rhs_scale)
    for i, j in ((0, 0), (3, 7)):
        promoted = np.float32(0)
        for b in range(3):
            span = np.s_[b * 128 : (b + 1) * 128]
            accum = _accumulate_exactly(lhs[i, span], rhs[j, span])
            if rhs_block == (1, 128):
                accum = _fraction(_round_to_f32(_fraction(lhs_scale[i, b]) * accum))
                scale = rhs_scale[j, b]
            else:
                scale = lhs_scale[i, b] * rhs_scale[j // 128, b]
            promoted = _round_to_f32(_fraction(scale) * accum + _fraction(promoted))
        assert out[i, j] == promoted


def test_zero_padding_of_k_changes_nothing():
    lhs, lhs_scale, rhs, rhs_scale = _case(8, 4, 8, 200, (1, 128))
    padded = [np.concatenate([x, np.zeros((len(x), 56), E4M3)], axis=1) for x in (lhs, rhs)]
    reference.assert_same_bits(
        bit_model.gemm(padded[0], lhs_scale, padded[1], rhs_scale),
        bit_model.gemm(lhs, lhs_scale, rhs, rhs_scale),
    )


def test_accum_is_added_last():
    case = _case(9, 4, 8, 256, (1, 128))
    accum = np.random.default_rng(9).normal(size=(4, 8)).astype(np.float32)
    reference.assert_same_bits(bit_model.gemm(*case, accum=accum), accum + bit_model.gemm(*case))


def test_elements_are_entries_of_the_whole():
    """Chunks of sampled elements, in 1d2d with a ragged last scale block."""
    case = _case(10, 8, 160, 300, (128, 128))
    rng = np.random.default_rng(10)
    rows, cols = rng.integers(0, 8, 500), rng.integers(0, 160, 500)
    reference.assert_same_bits(
        bit_model.gemm_elements(*case, rows, cols), bit_model.gemm(*case)[rows, cols]
    )


def test_fit_recovers_a_hidden_rule():
    case = _case(11, 8, 40, 256, (1, 128), (E5M2, E4M3))
    rows, cols = np.divmod(np.arange(320), 40)
    hidden = Rule(terms_per_step=16, fraction_bits=12, result_bits=11, normalized_products=True)
    observed = bit_model.gemm_elements(*case, rows, cols, rule=hidden)
    (best, rule), (second, _), *_ = bit_model.fit(*case, rows, cols, observed)
    assert (best, rule) == (1.0, hidden)
    assert second < 1
