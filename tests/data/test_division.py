"""Both divisions against NumPy's f64, for every mantissa."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jax_fp8gemm._data import division

_MANTISSAS = np.arange(1 << 23, dtype=np.uint32)
# The smallest scale and amax, one in the middle, and those near the largest.
_EXPONENTS = 127 - 92, 127, 127 + 100


def _floats(exponent: int) -> np.ndarray:
    return (_MANTISSAS | np.uint32(exponent << 23)).view(np.float32)


@pytest.mark.parametrize("exponent", _EXPONENTS)
@pytest.mark.parametrize("fmax_exponent", (6, 13))
def test_an_amax_divided_by_fmax_is_correctly_rounded(exponent, fmax_exponent):
    amax = _floats(exponent)
    found = jax.jit(division.divide_by_fmax, static_argnums=1)(amax, fmax_exponent)
    exact = (amax.astype(np.float64) / (7 << fmax_exponent)).astype(np.float32)
    reference.assert_same_bits(found, exact, "scale")


@pytest.mark.parametrize("exponent", _EXPONENTS)
def test_an_inverse_is_correctly_rounded(exponent):
    x = _floats(exponent)
    found = jax.jit(division.invert)(x)
    reference.assert_same_bits(found, (1 / x.astype(np.float64)).astype(np.float32), "inverse")


def test_the_inverse_of_nan_is_nan():
    assert np.isnan(division.invert(jnp.asarray(division.NAN)))
