"""Exact sums and roundings: their values, and the derivatives of sums and of the identity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jax_fp8gemm._data import kept_rounding

DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_each_number_of_16_bits_is_the_same_number_in_f32(dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    found = jax.jit(kept_rounding.widened)(jnp.asarray(bits.view(dtype)))
    expected = bits.view(dtype).astype(np.float32)
    finite = np.isfinite(expected)
    reference.assert_same_bits(found[finite], expected[finite])
    np.testing.assert_array_equal(found, expected)  # also Infs and NaNs


@DTYPES
def test_the_derivative_of_a_sum_is_that_of_each_term(dtype):
    x, y, dout = (jnp.asarray([1.5, -3, 0], dtype) * i for i in (1, 2, 3))
    out, pullback = jax.vjp(jax.jit(kept_rounding.add_rounded), x, y)
    np.testing.assert_array_equal(out, x + y)
    for gradient in pullback(dout):
        assert gradient.dtype == dtype
        np.testing.assert_array_equal(gradient, dout)


@DTYPES
def test_the_derivative_of_a_rounding_is_the_identity(dtype):
    x, dout = jnp.asarray([1.5, -3, 0], jnp.float32), jnp.asarray([1, 2, -4], jnp.float32)
    there_and_back = lambda x: kept_rounding.exact_f32(kept_rounding.rounded(x, dtype))
    _, pullback = jax.vjp(there_and_back, x)
    np.testing.assert_array_equal(pullback(dout)[0], dout)
    _, tangent = jax.jvp(partial(kept_rounding.rounded, dtype=dtype), [x], [dout])
    np.testing.assert_array_equal(tangent, dout.astype(dtype))
