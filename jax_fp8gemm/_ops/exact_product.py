"""exact_product: a product without FP8 whose bits neither other rows nor the program change.

An XLA dot adds in an order that depends on its kernel, and XLA chooses the kernel by the shape.
Here the products are those of integers, whose sum is the same in any order. A row of lhs, and a
column of rhs, is rounded to integers in one unit:

    unit    = 2^(e - 21), where 2^e <= the largest |x| of the row < 2^(e + 1)
    integer = x / unit, to nearest, ties away from zero          at most 2^22
            = d2 2^16 + d1 2^8 + d0                              digits of 8 bits, -128..127
    out     = sum over k of the products of the integers, exactly, times both units

out is rounded once to f32, and then to its dtype. So it depends on one row of lhs and one column of
rhs alone. Nine int8 products run on the tensor cores. An Inf or a NaN makes its row or its column
NaN. Its gradients are such products too.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.kept_rounding import exact_f32, rounded
from jax_fp8gemm._emulation import f32
from jax_fp8gemm._ops.product_spec import ProductSpec
from jax_fp8gemm._ops.reverse_mode import only_once, reverse_mode
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes

_U = np.uint32
_I = np.int32
_NUM_DIGITS = 3
_UNIT_BITS = 21
# An int32 holds the sum of three products of digits, below 2^15 each, over so many of k.
_MAX_PART = 1 << 15
# And 64 bits hold the sum of products below 2^44.
_MAX_K = 1 << 18


def exact_product(spec: ProductSpec, lhs: jax.Array, rhs: jax.Array, out_spec: Any) -> jax.Array:
    """Multiplies lhs (..., m, k) by rhs (k, n). out_spec: how Explicit mesh axes cut the result."""
    specs = tuple(jax.typeof(x).sharding.spec for x in (lhs, rhs))
    return reverse_mode("matmul", partial(_product, spec, (*specs, out_spec)), lhs, rhs)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(spec: ProductSpec, shardings: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    run = partial(_multiply, dtype=spec.out_dtype)
    return with_auto_axes(run, (lhs, rhs), lambda: shardings[2])


def _fwd(spec: ProductSpec, shardings: Any, lhs: jax.Array, rhs: jax.Array) -> Any:
    return _product(spec, shardings, lhs, rhs), (lhs, rhs)


def _bwd(spec: ProductSpec, shardings: Any, kept: Any, dout: jax.Array) -> Any:
    lhs, rhs, dout = only_once("matmul", *kept, dout)

    def run(lhs: jax.Array, rhs: jax.Array, dout: jax.Array) -> Any:
        matrix = lambda x: x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        dlhs = _multiply(dout, rhs.T, dtype=lhs.dtype)
        return dlhs, _multiply(matrix(lhs).T, matrix(dout), dtype=rhs.dtype)

    return with_auto_axes(run, (lhs, rhs, dout), lambda: shardings[:2])


_product.defvjp(_fwd, _bwd)


class _Integers(NamedTuple):
    """Numbers in units of 2^(exponent - 21), as digits.

    Attributes:
      digits: three int8 arrays (..., r, k), the lowest digit first.
      exponent: (..., r, 1) int32.
      is_bad: (..., r, 1), where the row has an Inf or a NaN.
    """

    digits: list[jax.Array]
    exponent: jax.Array
    is_bad: jax.Array


# Jitted for calls outside jit, which would otherwise run its operations one by one.
@partial(jax.jit, static_argnames="dtype")
def _multiply(lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    """Multiplies (..., m, k) by (k, n)."""
    if not isinstance(lhs.shape[-1], int) or lhs.shape[-1] > _MAX_K:
        raise NotImplementedError(
            f"matmul: a product with batch_invariant and without FP8 must sum over a known number "
            f"of elements, {_MAX_K} at most; got {checks.short_type(lhs)} times "
            f"{checks.short_type(rhs)}. Its gradient sums over the rows of lhs."
        )
    x, y = _as_integers(lhs), _as_integers(rhs.T)
    high = low = jnp.zeros((*lhs.shape[:-1], rhs.shape[1]), jnp.uint32)
    for start in range(0, lhs.shape[-1], _MAX_PART):
        part = slice(start, start + _MAX_PART)
        for place in range(2 * _NUM_DIGITS - 1):
            high, low = _add(high, low, _product_of_digits(x, y, place, part), 8 * place)
    is_negative = (high >> 31) != 0
    low = jnp.where(is_negative, _U(0) - low, low)
    high = jnp.where(is_negative, ~high + (low == 0).astype(jnp.uint32), high)
    of_columns = lambda x: x.reshape((1,) * (lhs.ndim - 1) + (-1,))
    exponent = x.exponent + of_columns(y.exponent) - _I(2 * _UNIT_BITS)
    bits = f32.round_words(high, low, exponent)
    bits |= jnp.where(is_negative, _U(1 << 31), _U(0))
    is_bad = x.is_bad | of_columns(y.is_bad)
    return rounded(f32.from_bits(jnp.where(is_bad, f32.NAN, bits)), dtype)


def _as_integers(x: jax.Array) -> _Integers:
    bits = f32.to_bits(exact_f32(x))
    exponent = ((bits >> 23) & _U(255)).astype(jnp.int32)
    mantissa = ((bits & _U((1 << 23) - 1)) | _U(1 << 23)).astype(jnp.int32)
    largest = jnp.max(exponent, axis=-1, keepdims=True, initial=1)
    shift = jnp.minimum(largest - exponent + _I(23 - _UNIT_BITS), _I(30))
    size = (mantissa + (_I(1) << (shift - _I(1)))) >> shift
    size = jnp.where(exponent == 0, _I(0), size)  # a subnormal number counts as zero
    rest, digits = jnp.where((bits >> 31) != 0, -size, size), []
    for _ in range(_NUM_DIGITS):
        digit = ((rest + _I(128)) & _I(255)) - _I(128)
        digits.append(digit.astype(jnp.int8))
        rest = (rest - digit) >> 8
    return _Integers(digits, largest - _I(127), largest == 255)


def _product_of_digits(x: _Integers, y: _Integers, place: int, part: slice) -> jax.Array:
    """Returns the sum of all products of digits that belong to 2^(8 place), int32 (..., m, n)."""
    pairs = [(i, place - i) for i in range(_NUM_DIGITS) if 0 <= place - i < _NUM_DIGITS]
    lhs = jnp.concatenate([x.digits[i][..., part] for i, _ in pairs], axis=-1)
    rhs = jnp.concatenate([y.digits[j][..., part] for _, j in pairs], axis=-1)
    dims = ((lhs.ndim - 1,), (1,)), ((), ())
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.int32)


def _add(high: jax.Array, low: jax.Array, x: jax.Array, shift: int) -> tuple[jax.Array, jax.Array]:
    """Adds int32 x * 2^shift, for a shift up to 32, to integers of 64 bits."""
    if shift == 0:
        x_high, x_low = x >> 31, x
    elif shift == 32:
        x_high, x_low = x, jnp.zeros_like(x)
    else:
        x_high, x_low = x >> (32 - shift), x << shift
    x_high, x_low = (lax.bitcast_convert_type(part, jnp.uint32) for part in (x_high, x_low))
    sum_ = low + x_low
    return high + x_high + (sum_ < low).astype(jnp.uint32), sum_
