"""Both forms of each division against NumPy's f64, for every mantissa."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jax_fp8gemm._data import division

_MANTISSAS = np.arange(1 << 23, dtype=np.uint32)
# The smallest scale and amax, one in the middle, and those near the largest.
_EXPONENTS = 127 - 92, 127, 127 + 100
_FORMS = pytest.mark.parametrize("form", ("f64", "integers"))


def _floats(exponent: int) -> np.ndarray:
    return (_MANTISSAS | np.uint32(exponent << 23)).view(np.float32)


@_FORMS
@pytest.mark.parametrize("exponent", _EXPONENTS)
@pytest.mark.parametrize("fmax_exponent", (6, 13))
def test_an_amax_divided_by_fmax_is_correctly_rounded(form, exponent, fmax_exponent):
    amax = _floats(exponent)
    function = getattr(division, f"_divide_by_fmax_in_{form}")
    found = jax.jit(function, static_argnums=1)(amax, fmax_exponent)
    exact = (amax.astype(np.float64) / (7 << fmax_exponent)).astype(np.float32)
    reference.assert_same_bits(found, exact, "scale")


@_FORMS
@pytest.mark.parametrize("exponent", _EXPONENTS)
def test_an_inverse_is_correctly_rounded(form, exponent):
    x = _floats(exponent)
    found = jax.jit(getattr(division, f"_invert_in_{form}"))(x)
    reference.assert_same_bits(found, (1 / x.astype(np.float64)).astype(np.float32), "inverse")


@_FORMS
def test_the_inverse_of_nan_is_nan(form):
    assert np.isnan(getattr(division, f"_invert_in_{form}")(jnp.asarray(division.NAN)))


@pytest.mark.parametrize("platform, has_f64", (("cpu", True), ("cuda", False)))
def test_a_program_has_one_form(platform, has_f64):
    traced = jax.jit(jax.vmap(division.invert)).trace(jnp.ones((2, 3), jnp.float32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("f64" in text, "case" in text) == (has_f64, False)
