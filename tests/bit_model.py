"""Predicts the f32 results of the FP8 GEMM kernels bit for bit; imports nothing of the package.

A result element is a chain over the k-blocks of 128, ascending:
    promoted = fma(lhs_scale * rhs_scale, accum_block, promoted)        f32, promoted starts at +0
or, with a rhs scale of its own for every column (1d1d),
    promoted = fma(rhs_scale, lhs_scale * accum_block + 0, promoted)    the 0 turns -0 into +0
accum_block is what the tensor core leaves after four k32 steps. One step, as fitted to an H200 on
e4m3 operands (12 seeds of normal, mixed-magnitude and cancelling data, no bit missed):
  1. terms are the 32 products and the accumulator, all exact;
  2. e_max is the largest exponent among the terms that are not zero. A product's exponent is that
     of lhs plus that of rhs, not normalised: significands in [1, 4) keep it, and a subnormal
     operand counts with the exponent of the smallest normal;
  3. every term is truncated toward zero to 13 fraction bits below e_max;
  4. the truncated terms are added exactly and the sum is truncated toward zero to 1 + 13 bits.
Rule holds those choices as parameters, and fit() finds the rules that explain given results.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

SCALE_BLOCK = 128
_ZERO_EXPONENT = -(2**14)  # below any exponent, also after adding two
_CHUNK_ELEMS = 2**21  # products held at once


@dataclass(frozen=True)
class Rule:
    """How one step of the tensor core adds.

    terms_per_step: products added at once (32 is one wgmma k32 instruction).
    fraction_bits: bits kept of every term below e_max.
    result_bits: bits kept of the sum below its own leading one.
    normalized_products: take the exponent of the product itself instead of the sum of exponents.
    """

    terms_per_step: int = 32
    fraction_bits: int = 13
    result_bits: int = 13
    normalized_products: bool = False


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
# (lhs format, rhs format) -> rule. Fitted for e4m3 x e4m3; an H200 gave the same for the others.
RULES = {formats: Rule() for formats in product((E4M3, E5M2), repeat=2)}


def candidates() -> Iterable[Rule]:
    """The rules fit() tries."""
    choices = product((32, 16), range(10, 20), (*range(10, 16), 23), (False, True))
    return (Rule(*choice) for choice in choices)


def fma_f32(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.float32]:
    """a * b + c with one rounding to f32, elementwise.

    The f64 product of two f32 is exact. The sum is rounded to odd in f64 (53 >= 24 + 2 bits), after
    which rounding to f32 cannot round twice.
    """
    a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        p = a * b
        total = p + c
        c_part = total - p
        error = (p - (total - c_part)) + (c - c_part)  # two-sum: total + error is the exact sum
        is_even = (total.view(np.uint64) & np.uint64(1)) == 0
        to_odd = np.isfinite(total) & (error != 0) & is_even
        total = np.where(to_odd, np.nextafter(total, np.copysign(np.inf, error)), total)
        return total.astype(np.float32)


def _exponent(x: np.ndarray) -> NDArray[np.int32]:
    """floor(log2 |x|), or a number below every exponent for 0."""
    return np.where(x == 0, _ZERO_EXPONENT, np.frexp(x)[1] - 1).astype(np.int32)


def _operand_exponents(values: np.ndarray) -> NDArray[np.int32]:
    """Exponents as the tensor core reads them: a subnormal's is that of the smallest normal."""
    table = np.arange(256, dtype=np.uint8).view(values.dtype).astype(np.float32)
    finite = np.where(np.isfinite(table), table, 0)
    smallest = int(np.log2(float(ml_dtypes.finfo(values.dtype).smallest_normal)))
    exponents = np.where(finite == 0, _ZERO_EXPONENT, np.maximum(_exponent(finite), smallest))
    return exponents.astype(np.int32)[values.view(np.uint8)]


def _truncate(x: np.ndarray, result_bits: int) -> np.ndarray:
    """x toward zero to 1 + result_bits significant bits."""
    significand, exponent = np.frexp(x)
    bits = result_bits + 1
    return np.ldexp(np.trunc(np.ldexp(significand, bits)), exponent - bits).astype(x.dtype)


def _step(accum: np.ndarray, products: np.ndarray, exponents: np.ndarray, rule: Rule) -> np.ndarray:
    """One step: accum (...), products and their exponents (..., terms_per_step)."""
    e_max = np.maximum(exponents.max(axis=-1), _exponent(accum))
    is_zero = e_max <= _ZERO_EXPONENT
    shift = np.where(is_zero, 0, rule.fraction_bits - e_max)
    to_units = np.ldexp(accum.dtype.type(1), shift)
    terms = np.trunc(products * to_units[..., None]).sum(axis=-1) + np.trunc(accum * to_units)
    return _truncate(np.ldexp(terms, -shift), rule.result_bits)


def accumulate_blocks(lhs: np.ndarray, rhs: np.ndarray, rule: Rule) -> np.ndarray:
    """FP8 lhs and rhs (elements, num_blocks, 128) -> accumulators (elements, num_blocks) f32.

    NaN operands make their block NaN; e5m2 infinities follow IEEE arithmetic.
    """
    # Sums of truncated terms stay below 2^(fraction_bits + 8) units, so f32 holds them up to 16.
    dtype = np.float32 if max(rule.fraction_bits, rule.result_bits) <= 16 else np.float64
    with np.errstate(invalid="ignore"):
        products = lhs.astype(dtype) * rhs.astype(dtype)
    is_special = ~np.isfinite(products)
    specials = np.where(is_special, products, 0).sum(axis=-1) if is_special.any() else None
    products[is_special] = 0
    if rule.normalized_products:
        exponents = _exponent(products)
    else:
        exponents = _operand_exponents(lhs) + _operand_exponents(rhs)
        exponents[products == 0] = _ZERO_EXPONENT
    accum = np.zeros(lhs.shape[:-1], dtype)
    for start in range(0, SCALE_BLOCK, rule.terms_per_step):
        step = np.s_[..., start : start + rule.terms_per_step]
        accum = _step(accum, products[step], exponents[step], rule)
    if specials is not None:
        accum = np.where(is_special.any(axis=-1), specials, accum)
    return accum.astype(np.float32)


def promote(scales: NDArray[np.float32], accums: NDArray[np.float32]) -> NDArray[np.float32]:
    """The fma chain: scales and accums (elements, num_blocks) -> (elements,)."""
    promoted = np.zeros(accums.shape[0], np.float32)
    for b in range(accums.shape[1]):
        promoted = fma_f32(scales[:, b], accums[:, b], promoted)
    return promoted


def _in_blocks(values: np.ndarray) -> np.ndarray:
    """(elements, k) -> (elements, num_blocks, 128), zero-padded."""
    padding = -values.shape[1] % SCALE_BLOCK
    if padding:
        values = np.pad(values.view(np.uint8), ((0, 0), (0, padding))).view(values.dtype)
    return values.reshape(values.shape[0], -1, SCALE_BLOCK)


def gemm_elements(
    lhs: ArrayLike,
    lhs_scale: ArrayLike,
    rhs: ArrayLike,
    rhs_scale: ArrayLike,
    rows: ArrayLike,
    cols: ArrayLike,
    *,
    is_1d1d: bool | None = None,
    accum: ArrayLike | None = None,
    rule: Rule | None = None,
) -> NDArray[np.float32]:
    """Predicted out[rows[i], cols[i]] in f32.

    Args:
      lhs, rhs: (m, k) and (n, k) FP8.
      lhs_scale: (m, kb) f32. rhs_scale: (nb, kb) f32 (1d2d) or (n, kb) (1d1d).
      rows, cols: (elements,) indices.
      is_1d1d: by default what the shape of rhs_scale says; for n = 1 it says nothing.
      accum: (elements,) f32 that the result is added to.
      rule: by default the one in RULES for the formats of lhs and rhs.
    """
    lhs, lhs_scale, rhs, rhs_scale = map(np.asarray, (lhs, lhs_scale, rhs, rhs_scale))
    rows, cols = np.asarray(rows), np.asarray(cols)
    rule = rule or RULES[lhs.dtype, rhs.dtype]
    if is_1d1d is None:
        if rhs.shape[0] == 1:
            raise ValueError("bit_model: is_1d1d must be given for n = 1; got None")
        is_1d1d = rhs_scale.shape[0] == rhs.shape[0]
    scale_rows = cols if is_1d1d else cols // SCALE_BLOCK
    out = np.empty(rows.shape, np.float32)
    chunk = max(1, _CHUNK_ELEMS // max(1, lhs.shape[1]))
    for start in range(0, len(rows), chunk):
        span = np.s_[start : start + chunk]
        accums = accumulate_blocks(_in_blocks(lhs[rows[span]]), _in_blocks(rhs[cols[span]]), rule)
        lhs_scales, rhs_scales = lhs_scale[rows[span]], rhs_scale[scale_rows[span]]
        with np.errstate(over="ignore", under="ignore"):
            if is_1d1d:
                out[span] = promote(rhs_scales, lhs_scales * accums + np.float32(0))
            else:
                out[span] = promote(lhs_scales * rhs_scales, accums)
    return out if accum is None else np.asarray(accum, np.float32) + out


def gemm(lhs, lhs_scale, rhs, rhs_scale, *, accum=None, rule: Rule | None = None):
    """gemm_elements for every element of a small result: (m, n) f32."""
    m, n = lhs.shape[0], rhs.shape[0]
    rows, cols = np.divmod(np.arange(m * n), n)
    flat = None if accum is None else np.asarray(accum).ravel()
    out = gemm_elements(lhs, lhs_scale, rhs, rhs_scale, rows, cols, accum=flat, rule=rule)
    return out.reshape(m, n)


def same_bits(x: ArrayLike, y: ArrayLike) -> NDArray[np.bool_]:
    """Where two f32 arrays have the same bits; any NaN equals any NaN."""
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    return (x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))


def fit(
    lhs, lhs_scale, rhs, rhs_scale, rows, cols, observed, rules: Iterable[Rule] | None = None
) -> list[tuple[float, Rule]]:
    """Fraction of `observed` (elements,) f32 that each rule predicts bit for bit, best first."""
    results = []
    for rule in candidates() if rules is None else rules:
        predicted = gemm_elements(lhs, lhs_scale, rhs, rhs_scale, rows, cols, rule=rule)
        results.append((float(same_bits(predicted, observed).mean()), rule))
    return sorted(results, key=lambda result: -result[0])
