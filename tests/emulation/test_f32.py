"""The f32 arithmetic of the emulation against NumPy's, subnormal numbers included."""

from itertools import product

import bit_model
import jax
import ml_dtypes
import numpy as np
import pytest
import reference

from jax_fp8gemm._emulation import f32

COUNT = 200_000
SPECIAL = np.asarray(
    [0, 0x3F800000, 0x7F800000, 0x7FC12345, 0x7F800001, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF],
    np.uint32,
)
fma = jax.jit(f32.fma)


def _numbers(rng, first, last, mantissa_bits=23):
    """Of either sign, with biased exponents in a range and mantissas of some bits."""
    mantissa = rng.integers(0, 2**mantissa_bits, COUNT, dtype=np.uint32) << (23 - mantissa_bits)
    exponent = rng.integers(first, last, COUNT, dtype=np.uint32) << 23
    return (mantissa | exponent | rng.integers(0, 2, COUNT, dtype=np.uint32) << 31).view(np.float32)


def _with_cuda_nans(x):
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32))


def _check(a, b, c):
    with np.errstate(invalid="ignore"):
        expected = _with_cuda_nans(bit_model.fma_f32(a, b, c))
    actual = fma(*(x.view(np.uint32) for x in (a, b, c)))
    reference.assert_same_bits(actual, expected)


# Biased exponents of a, b and c.
RANGES = {
    "any": [(0, 256)] * 3,
    "near": [(120, 134)] * 3,
    "subnormal results": [(40, 80), (40, 80), (0, 10)],
    "subnormal operands": [(0, 3), (100, 150), (0, 30)],
    "overflow": [(180, 200), (180, 200), (240, 255)],
    "far apart": [(100, 110), (100, 110), (100, 160)],
}


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("mantissa_bits", [23, 5], ids=["", "ties"])
def test_fma(ranges, mantissa_bits):
    rng = np.random.default_rng(0)
    _check(*(_numbers(rng, *exponents, mantissa_bits) for exponents in ranges))


def test_fma_of_special_numbers():
    signed = np.concatenate([SPECIAL, SPECIAL | np.uint32(1 << 31)]).view(np.float32)
    _check(*np.asarray(list(product(signed, repeat=3)), np.float32).T.copy())


def test_fma_that_cancels():
    rng = np.random.default_rng(1)
    a, b = (_numbers(rng, 120, 134) for _ in range(2))
    _check(a, b, -(a * b))
    _check(a, b, np.nextafter(-(a * b), np.float32(0)))


@pytest.mark.parametrize("name", ["mul", "add"])
def test_operations_of_two(name):
    rng = np.random.default_rng(2)
    a, b = (_numbers(rng, 0, 256) for _ in range(2))
    a[:18], b[:18] = np.resize(SPECIAL, 18).view(np.float32), np.repeat(SPECIAL[:2], 9).view("f4")
    with np.errstate(all="ignore"):
        expected = _with_cuda_nans(a * b if name == "mul" else a + b)
    actual = jax.jit(getattr(f32, name))(a.view(np.uint32), b.view(np.uint32))
    reference.assert_same_bits(actual, expected)


def test_bfloat16():
    rng = np.random.default_rng(4)
    x = np.concatenate([_numbers(rng, 0, 255), _numbers(rng, 0, 255, 8), [np.inf, -np.inf]])
    expected = x.astype(np.float32).astype(ml_dtypes.bfloat16)
    to_bfloat16 = jax.jit(f32.to_bfloat16)
    reference.assert_same_bits(to_bfloat16(x.astype(np.float32).view(np.uint32)), expected)
    nan = to_bfloat16(np.asarray([0x7FFFFFFF, 0xFF800001], np.uint32))
    np.testing.assert_array_equal(np.asarray(nan).view(np.uint16), 0x7FFF)
