"""The emulated sums of the tensor core against the bit model."""

from itertools import product

import bit_model
import jax
import numpy as np
import pytest
import reference
from bit_model import E4M3, E5M2

from jax_fp8gemm._emulation import tensor_core

block_sums = jax.jit(tensor_core.block_sums)
M, N = 24, 40


def _codes(rng, rows, fmt, mask=0xFF, specials=0.0):
    """Codes with the bits of `mask`; that part of those of Inf and NaN."""
    codes = rng.integers(0, 256, (rows, 128), dtype=np.uint8) & np.uint8(mask)
    is_special = ~np.isfinite(codes.view(fmt).astype(np.float32))
    return np.where(is_special & (rng.random(codes.shape) >= specials), 0, codes).view(fmt)


def _check(lhs, rhs):
    pairs = np.repeat(lhs, len(rhs), axis=0)[:, None], np.tile(rhs, (len(lhs), 1))[:, None]
    with np.errstate(invalid="ignore"):
        expected = bit_model.accumulate_blocks(*pairs, bit_model.RULES[lhs.dtype, rhs.dtype])
    actual = np.asarray(block_sums(lhs, rhs)).ravel()
    assert bit_model.same_bits(actual, expected.ravel()).all()
    return actual


formats = pytest.mark.parametrize("formats", tuple(product((E4M3, E5M2), repeat=2)), ids=str)


@formats
# Any; zeros, subnormals and the smallest normals; two exponents far apart and zeros.
@pytest.mark.parametrize("mask", [0xFF, 0x8F, 0x87, 0xC0])
def test_any_codes(formats, mask):
    rng = np.random.default_rng(mask)
    lhs, rhs = (_codes(rng, rows, fmt, mask) for rows, fmt in zip((M, N), formats, strict=True))
    _check(lhs, rhs)
    _check(lhs, _codes(rng, N, formats[1]))


@formats
def test_products_that_cancel(formats):
    rng = np.random.default_rng(1)
    lhs, rhs = (_codes(rng, rows, fmt) for rows, fmt in zip((M, N), formats, strict=True))
    lhs.view(np.uint8)[:, 1::2] = lhs.view(np.uint8)[:, ::2]
    rhs.view(np.uint8)[:, 1::2] = rhs.view(np.uint8)[:, ::2] ^ 0x80
    assert (_check(lhs, rhs) == 0).mean() > 0.5
    lhs.view(np.uint8)[:, ::14] &= 0x87
    _check(lhs, rhs)


@formats
def test_nan_and_inf(formats):
    rng = np.random.default_rng(2)
    lhs, rhs = (
        _codes(rng, rows, fmt, 0xFF, 0.05) for rows, fmt in zip((M, N), formats, strict=True)
    )
    sums = _check(lhs, rhs)
    assert 0 < np.isnan(sums).mean() < 1
    if formats == (E5M2, E5M2):
        assert np.isinf(sums).any()


def test_zeros():
    zeros = np.zeros((M, 128), E4M3)
    reference.assert_same_bits(block_sums(zeros, zeros), np.zeros((M, M), np.float32))
