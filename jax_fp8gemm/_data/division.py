"""Two correctly rounded divisions of f32 numbers: amax / FMAX and 1 / scale.

An f32 division will not do. On GPU, XLA's is not IEEE (div.full, 2 ulp), and on CPU XLA turns a
division by a constant into a multiplication. So there are two forms of each division:

    on CPU       divides in f64. XLA takes few operations to compile that, and compiles the
                 references of a model hundreds of times.
    elsewhere    computes in integers. On an H200 the division in f64 gave other bits for 1 element
                 of a million: XLA seems to divide in f32 where operands and result are f32.

The form is chosen when a program is lowered. So each division is a primitive:
lax.platform_dependent would leave a conditional in the program, for XLA to compile.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportMissingParameterType=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

INF_BITS = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000).view(np.float32)
IMPLICIT_BIT = np.uint32(1 << 23)
MANTISSA_MASK = np.uint32((1 << 23) - 1)


def divide_by_fmax(amax: jax.Array, fmax_exponent: int) -> jax.Array:
    """Returns amax / FMAX of a finite, normal amax, where FMAX is 7 * 2^fmax_exponent."""
    return _divide_by_fmax_p.bind(amax, fmax_exponent=fmax_exponent)


def invert(x: jax.Array) -> jax.Array:
    """Returns 1 / x of a positive x, where both are normal. That of NaN is NaN."""
    return _invert_p.bind(x)


# In f64 a quotient is wrong by less than 2^-50 of itself. A quotient of two f32 numbers is never
# halfway between two others, and further than 2^-49 of itself from there. So rounding the f64
# number to f32 gives what the quotient rounds to.


def _divide_by_fmax_in_f64(amax: jax.Array, fmax_exponent: int) -> jax.Array:
    with jax.enable_x64(True):
        return (amax.astype(np.float64) / np.float64(7 << fmax_exponent)).astype(np.float32)


def _invert_in_f64(x: jax.Array) -> jax.Array:
    with jax.enable_x64(True):
        return (np.float64(1) / x.astype(np.float64)).astype(np.float32)


def _divide_by_fmax_in_integers(amax: jax.Array, fmax_exponent: int) -> jax.Array:
    """An exact division of the mantissa by 7, and a shift."""
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    mantissa = (bits & MANTISSA_MASK) | IMPLICIT_BIT
    # mantissa / 7 * 2^3 has 24 bits, or 25 where mantissa >= 7 * 2^21: then one shift less.
    is_large = (mantissa >= np.uint32(7 << 21)).astype(jnp.uint32)
    numerator = mantissa << (np.uint32(3) - is_large)
    quotient = lax.div(numerator + np.uint32(3), np.uint32(7))  # to nearest: 7 is odd, so no ties
    exponent = (bits >> 23) - np.uint32(3 + fmax_exponent) + is_large
    # Addition, not |: a quotient rounded up to 2^24 carries into the exponent.
    return lax.bitcast_convert_type((exponent << 23) + quotient - IMPLICIT_BIT, jnp.float32)


def _invert_in_integers(x: jax.Array) -> jax.Array:
    """Moves the float quotient by what its remainder says.

    With x = mantissa * 2^e the wanted integer of 24 or 25 bits is 2^47 / mantissa, rounded. A float
    division that is 3 ulp off at worst gives a guess. The remainder of the guess, exact modulo
    2^32, says by how much to move it: remainder / mantissa, rounded, is between -3 and 3. No ties:
    2^48 = mantissa * odd only where mantissa is a power of two, and its remainder is a multiple.
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


def _by_platform(
    name: str, on_cpu: Callable[..., jax.Array], elsewhere: Callable[..., jax.Array]
) -> Primitive:
    """Makes a primitive of a function that works on each element by itself."""
    primitive = Primitive(f"jax_fp8gemm_{name}")
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(lambda x, **_: x.update(weak_type=False))
    batching.primitive_batchers[primitive] = lambda operands, dims, **params: (
        primitive.bind(*operands, **params),
        dims[0],
    )
    for platform, function in (("cpu", on_cpu), (None, elsewhere)):
        lowering = mlir.lower_fun(function, multiple_results=False)
        mlir.register_lowering(primitive, lowering, platform=platform)
    return primitive


_divide_by_fmax_p = _by_platform(
    "divide_by_fmax", _divide_by_fmax_in_f64, _divide_by_fmax_in_integers
)
_invert_p = _by_platform("invert", _invert_in_f64, _invert_in_integers)
