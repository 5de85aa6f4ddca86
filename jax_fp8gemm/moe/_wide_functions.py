"""Functions of _wide.py's numbers: square root, exp and log(1 + x)."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm.moe._wide import Wide, add, div, mulhi, normalised, power_of_two

_U = np.uint32
_I = np.int32
# (2^g - 1) / g on [0, 1], and (arctanh(z) / z - 1) / z^2 by z^2 on [0, 1/9]; units of 2^-32.
_EXP2 = (0xB17217F9, 0x3D7F7BA6, 0x0E3589F8, 0x02763464, 0x0057BF1A, 0x00099317, 0x00015BD3)
_ARCTANH = (0x55555564, 0x33331A4B, 0x24992DA4, 0x1BC86581, 0x1DBBCF2F)
_LOG2_E = _U(0xB8AA3B29)  # units of 2^-31


def sqrt(x: Wide) -> Wide:
    """Returns the square root of x above zero: three steps of Heron's method."""
    is_odd = x.exponent & _I(1)
    exponent = (x.exponent - is_odd) >> 1
    y = Wide(x.mantissa, is_odd)  # in [1, 4)
    units = x.mantissa >> (_I(2) - is_odd).astype(jnp.uint32)  # of 2^-29
    line = (units >> 2) + (units >> 4) + (units >> 5) + _U(370_000_000)
    root = normalised(line, jnp.full_like(exponent, 2))
    for _ in range(3):
        root = add(root, div(y, root))
        root = root._replace(exponent=root.exponent - _I(1))
    return root._replace(exponent=root.exponent + exponent)


def fixed(bits: jax.Array) -> jax.Array:
    """Returns the f32 with these bits in units of 2^-25, rounded, modulo 2^32."""
    mantissa = (bits & _U((1 << 23) - 1)) | _U(1 << 23)
    exponent = ((bits >> 23) & _U(255)).astype(jnp.int32) - _I(125)
    left = jnp.clip(exponent, 0, 32).astype(jnp.uint32)
    right = jnp.clip(-exponent, 1, 31).astype(jnp.uint32)
    rounded = (mantissa + (_U(1) << (right - _U(1)))) >> right
    units = jnp.where(exponent >= 0, lax.shift_left(mantissa, left), rounded)
    return jnp.where((bits >> 31) != 0, _U(0) - units, units)


def exp_of_negative(units: jax.Array) -> Wide:
    """Returns exp(-t) for t in [0, 128), in units of 2^-25."""
    # t / log(2): 8 bits before the point, 56 behind it.
    high, low = mulhi(units, _LOG2_E), units * _LOG2_E
    fraction = (high << 8) | (low >> 24)
    rest = _U(0) - fraction
    exponent = -((high >> 24).astype(jnp.int32)) - (fraction != 0).astype(jnp.int32)
    return Wide(_one_and(rest, _EXP2), exponent)


def log1p_over(x: Wide) -> Wide:
    """Returns log(1 + x) / x for x in [0, 1]: 2 arctanh(z) / z / (2 + x), with z = x / (2 + x)."""
    bottom = add(power_of_two(1, x), x)
    z = div(x, bottom)
    # In units of 2^-32; z is at most 1/3.
    units = z.mantissa >> jnp.clip(-z.exponent - _I(1), 0, 32).astype(jnp.uint32)
    series = _one_and(mulhi(units, units), _ARCTANH)
    return div(Wide(series, jnp.ones_like(x.exponent)), bottom)


def _one_and(x: jax.Array, coefficients: tuple[int, ...]) -> jax.Array:
    """Returns 1 + x * polynomial(x) in units of 2^-31, for x and coefficients in those of 2^-32."""
    sum_ = jnp.full_like(x, _U(coefficients[-1]))
    for coefficient in coefficients[-2::-1]:
        sum_ = _U(coefficient) + mulhi(sum_, x)
    return _U(1 << 31) + (mulhi(sum_, x) >> 1)
