"""block_sums: what Hopper's tensor core leaves of a k-block of 128 FP8 products.

It adds 32 products at a time to the sum so far, in four steps. docs/numerics.md has the rule. Here
every number is an f32 that holds it exactly: a product has 8 bits at most, and a sum of truncated
terms, counted in units of the last bit that is kept, is an integer below 2^21.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm._emulation import f32
from jax_fp8gemm._sharding.manual_axes import constant_like

_STEP = 32
_FRACTION_BITS = 13  # of a term, below the largest exponent; and of a sum, below its first bit
_DROPPED = np.uint32((1 << (23 - _FRACTION_BITS)) - 1)
# Exponents are from -28, or -41 for a sum, to 30. A zero's are below them, also after adding two.
_OF_ZERO = np.int32(-64)


def block_sums(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The sum of the products of each row of FP8 lhs (m, 128) with each row of rhs (n, 128).

    Returns f32 (m, n). An Inf or a NaN among the products gives what IEEE arithmetic gives.
    """
    lhs_f32, rhs_f32 = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    # No sum of finite products overflows.
    exact = lax.dot_general(lhs_f32, rhs_f32, (((1,), (1,)), ((), ())))
    operands = _finite(lhs_f32), _finite(rhs_f32), _exponents(lhs), _exponents(rhs)
    zeros = constant_like(exact, jnp.zeros_like(exact))
    total, _ = lax.scan(lambda total, xs: (_step(total, *xs), None), zeros, _in_steps(operands))
    return jnp.where(jnp.isfinite(exact), total, exact)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _in_steps(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """(r, 128) -> (steps, 32, r)."""
    return tuple(x.T.reshape(-1, _STEP, x.shape[0]) for x in operands)


def _exponents(x: jax.Array) -> jax.Array:
    """Those of FP8 x. A subnormal number has that of the smallest normal one."""
    x_f32 = x.astype(jnp.float32)
    smallest = int(np.log2(float(jnp.finfo(x.dtype).smallest_normal)))
    exponent = jnp.maximum(_exponent(x_f32), smallest)
    return jnp.where((x_f32 == 0) | ~jnp.isfinite(x_f32), _OF_ZERO, exponent)


def _exponent(x: jax.Array) -> jax.Array:
    """That of f32 x; -127 for 0."""
    return ((f32.to_bits(x) >> 23) & np.uint32(255)).astype(jnp.int32) - 127


def _step(total, lhs, rhs, lhs_exponents, rhs_exponents):
    """Adds 32 products: total (m, n), lhs (32, m), rhs (32, n) and their exponents."""
    exponent = jnp.maximum(_exponent(total), _OF_ZERO)
    for i in range(_STEP):
        exponent = jnp.maximum(exponent, lhs_exponents[i][:, None] + rhs_exponents[i][None])
    to_units = _power_of_two(_FRACTION_BITS - exponent)
    units = _truncate(total * to_units)
    for i in range(_STEP):
        units = units + _truncate((lhs[i][:, None] * rhs[i][None]) * to_units)
    kept = f32.from_bits(f32.to_bits(units) & ~_DROPPED)
    return kept * _power_of_two(exponent - _FRACTION_BITS)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _truncate(x: jax.Array) -> jax.Array:
    """x toward zero to an integer."""
    return x.astype(jnp.int32).astype(jnp.float32)
