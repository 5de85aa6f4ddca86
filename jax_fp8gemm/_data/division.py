"""Two correctly rounded divisions of f32 numbers: amax / FMAX and 1 / scale, in integers.

An f32 division will not do. On GPU, XLA's is not IEEE (div.full, 2 ulp), and on CPU XLA turns a
division by a constant into a multiplication. Nor will one in f64: on an H200 it gave other bits for
1 element of a million. XLA seems to divide in f32 where operands and result are f32.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INF_BITS = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000).view(np.float32)
IMPLICIT_BIT = np.uint32(1 << 23)
MANTISSA_MASK = np.uint32((1 << 23) - 1)


def divide_by_fmax(amax: jax.Array, fmax_exponent: int) -> jax.Array:
    """Returns amax / FMAX of a finite, normal amax, where FMAX is 7 * 2^fmax_exponent.

    It divides the mantissa by 7, exactly, and shifts.
    """
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    mantissa = (bits & MANTISSA_MASK) | IMPLICIT_BIT
    # mantissa / 7 * 2^3 has 24 bits, or 25 where mantissa >= 7 * 2^21: then one shift less.
    is_large = (mantissa >= np.uint32(7 << 21)).astype(jnp.uint32)
    numerator = mantissa << (np.uint32(3) - is_large)
    quotient = lax.div(numerator + np.uint32(3), np.uint32(7))  # to nearest: 7 is odd, so no ties
    exponent = (bits >> 23) - np.uint32(3 + fmax_exponent) + is_large
    # Addition, not |: a quotient rounded up to 2^24 carries into the exponent.
    return lax.bitcast_convert_type((exponent << 23) + quotient - IMPLICIT_BIT, jnp.float32)


def invert(x: jax.Array) -> jax.Array:
    """Returns 1 / x of a positive x, where both are normal. That of NaN is NaN.

    It moves the float quotient by what its remainder says. With x = mantissa * 2^e the wanted
    integer of 24 or 25 bits is 2^47 / mantissa, rounded. A float division that is 3 ulp off at
    worst gives a guess. The remainder of the guess, exact modulo 2^32, says by how much to move it:
    remainder / mantissa, rounded, is between -3 and 3. No ties: 2^48 = mantissa * odd only where
    mantissa is a power of two, and its remainder is a multiple.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    mantissa = (bits & MANTISSA_MASK) | IMPLICIT_BIT
    base = np.uint32(253 << 23) - (bits & ~MANTISSA_MASK)
    guess = lax.bitcast_convert_type(1.0 / x, jnp.uint32) - base + IMPLICIT_BIT
    # Twice the remainder, for 2^48 is 0 modulo 2^32, plus 7 / 2 times `twice`: a half to round to
    # nearest, and 3 to keep the numerator positive.
    twice = mantissa << 1
    numerator = np.uint32(7) * mantissa - twice * guess
    moved = guess - np.uint32(3)
    for i in range(1, 7):
        moved += (numerator >= np.uint32(i) * twice).astype(jnp.uint32)
    quotient = lax.bitcast_convert_type(base + moved - IMPLICIT_BIT, jnp.float32)
    return lax.select(bits < INF_BITS, quotient, jnp.full_like(quotient, NAN))
