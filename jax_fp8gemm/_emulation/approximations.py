"""ex2.approx.ftz.f32 and rcp.approx.ftz.f32 of a Hopper GPU, bit for bit.

Both are a table and a polynomial of degree two in fixed point. The first bits of a fraction of 23
bits choose a row (c0, c1, c2) of the table, and of the others, r,

    significand = (2^13 c0 +- c1 r + c2 square(r) + bias) >> 15

square() adds the partial products of r * r after cutting each at one bit. The tables and the biases
are those that explain all 2^23 results of an H200 for each instruction, and no others do.
Oberman and Siu, "A high-performance area-efficient multifunction interpolator", ARITH 2005,
describe such a unit.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8gemm._emulation import f32
from jax_fp8gemm._emulation.f32 import Bits

_I = np.int32
_IMPLICIT = _I(1 << 23)

# c0 c1 c2, in hexadecimal; c1 is subtracted.
_RCP_ROWS = """
    4000000 fffe 3f5  3f80fe2 fc0a 3dd  3f03f06 f82d 3c6  3e88cb5 f467 3b1  3e0f83e f0b6 39b
    3d980f8 ed1b 386  3d22638 e995 373  3cae75a e622 35f  3c3c3c4 e2c3 34d  3bcbade df77 33b
    3b5cc11 dc3d 329  3aef6cb d914 317  3a83a85 d5fd 306  3a196b4 d2f7 2f6  39b0ad3 d001 2e6
    3949662 cd1b 2d7  38e38e5 ca44 2c7  387f1e2 c77c 2b8  381c0e2 c4c3 2aa  37ba572 c218 29d
    3759f23 bf7b 290  36fad89 bceb 282  369d037 ba69 277  36406ca b7f3 26a  35e50d9 b589 25d
    358ae06 b32c 252  3531dee b0da 246  34da036 ae94 23c  3483486 ac59 231  342da81 aa28 225
    33d91d5 a803 21c  3385a2b a5e7 211  3333335 a3d6 207  32e1ca1 a1cf 1fe  3291620 9fd1 1f5
    3241f6b 9ddc 1ea  31f3833 9bf1 1e2  31a6034 9a0f 1da  3159724 9835 1d1  310dcc1 9664 1c9
    30c30c5 949b 1c1  30792f1 92da 1b9  3030305 9121 1b1  2fe80c2 8f70 1aa  2fa0bea 8dc6 1a2
    2f5a443 8c24 19c  2f14992 8a88 193  2ecfb9e 88f4 18d  2e8ba31 8767 186  2e48511 85e0 17f
    2e05c0c 8460 179  2dc3ef0 82e7 173  2d82d85 8174 16e  2d4279c 8006 166  2d02d04 7e9f 161
    2cc3d8e 7d3e 15c  2c8590d 7be2 155  2c47f52 7a8d 151  2c0b02e 793c 14b  2bceb78 77f1 146
    2b93107 76ab 140  2b580b0 756b 13c  2b1da49 742f 136  2ae3da9 72f8 131  2aaaaac 71c7 12e
    2a7212c 709a 129  2a3a100 6f71 123  2a02a04 6e4d 11f  29cbc17 6d2e 11b  2995712 6c13 117
    295fad6 6afc 112  292a73f 69ea 10f  28f5c2b 68db 10a  28c197b 67d1 107  288df0e 66ca 102
    285acc6 65c8 100  2828285 64c9 0fb  27f602a 63ce 0f8  27c459a 62d6 0f3  27932b6 61e2 0f0
    2762764 60f2 0ed  2732388 6005 0e9  2702705 5f1c 0e7  26d31c1 5e35 0e2  26a43a1 5d52 0df
    2675c8d 5c73 0de  2647c6b 5b96 0da  261a322 5abc 0d6  25ed09a 59e6 0d4  25c04bb 5912 0d0
    2593f6b 5841 0cd  2568098 5774 0cc  253c827 56a8 0c7  2511604 55e0 0c5  24e6a19 551b 0c4
    24bc450 5458 0c1  2492494 5397 0bd  2468ad1 52d9 0ba  243f6f3 521e 0b8  24168e3 5165 0b6
    23ee092 50af 0b4  23c5de9 4ffb 0b2  239e0d7 4f49 0af  237694a 4e9a 0ad  234f72e 4ded 0ab
    2328a71 4d42 0a9  2302304 4c99 0a6  22dc0d3 4bf3 0a5  22b63ce 4b4e 0a1  2290be4 4aac 0a0
    226b904 4a0c 09f  2246b1f 496d 09b  2222224 48d1 09a  21fde04 4837 099  21d9eaf 479e 096
    21b6418 4708 095  2192e2c 4673 093  216fcdf 45e0 091  214d024 454f 08f  212a7e8 44c0 08f
    2108423 4432 08c  20e64c4 43a6 08a  20c49bd 431c 089  20a3301 4293 087  2082084 420c 085
    2061239 4187 084  2040811 4103 083  2020203 4081 082
"""
_RCP_BIAS = 0x7E7
# c1 is added.
_EX2_ROWS = """
    2000003 58b9 1ee  205934a 59b0 1f5  20b361e 5aaa 1fa  210e8a5 5ba7 1ff  216ab12 5ca6 206
    21c7d89 5da9 209  222603c 5eae 20f  2285359 5fb6 214  22e570c 60c0 21d  2346b81 61ce 222
    23a90e8 62df 227  240c775 63f2 22f  2470f51 6509 234  24d68b0 6623 238  253d3c3 673f 241
    25a50b9 685f 247  260dfc5 6982 24d  267811a 6aa8 254  26e34e9 6bd2 258  274fb6a 6cfe 261
    27bd4cc 6e2e 267  282c148 6f61 26e  289c10e 7098 273  290d459 71d2 279  297fb5d 730f 281
    29f3651 7450 287  2a6856d 7594 28f  2ade8ea 76dc 295  2b560fe 7827 29e  2bcede5 7976 2a5
    2c48fda 7ac8 2ae  2cc4713 7c1f 2b3  2d413cf 7d79 2bb  2dbf64b 7ed7 2c1  2e3eec1 8038 2cb
    2ebfd6d 819e 2d1  2f42291 8307 2da  2fc5e6a 8474 2e3  304b137 85e5 2ec  30d1b36 875b 2f1
    3159cab 88d4 2fb  31e35d6 8a51 305  326e6fa 8bd3 30b  32fb057 8d59 313  3389233 8ee3 31c
    3418cd2 9071 326  34aa079 9204 32d  353cd6d 939b 336  35d13f7 9536 341  366745a 96d6 34a
    36feee1 987b 351  37983d6 9a24 35a  3833380 9bd1 366  38cfe2a 9d84 36d  396e41f 9f3b 377
    3a0e5ad a0f7 380  3ab0320 a2b7 38d  3b53cc4 a47d 395  3bf92ea a648 39d  3ca05e0 a817 3aa
    3d495f8 a9ec 3b2  3df4382 abc5 3bf  3ea0ecf ada4 3c9  3f4f834 af88 3d4
"""
_EX2_BIAS = 0x17E2


def _table(text: str) -> np.ndarray:
    """(3, rows)."""
    return np.asarray([int(x, 16) for x in text.split()], np.int32).reshape(-1, 3).T


_RCP, _EX2 = _table(_RCP_ROWS), _table(_EX2_ROWS)


# Jitted, because what a partitioned primitive runs must close over no table.
@jax.jit
def rcp(x: Bits) -> Bits:
    """1 / x. Subnormal operands and results count as zero."""
    exponent, fraction = _biased_exponent(x), _fraction(x)
    rest = fraction & _I(0xFFFF)
    square = _square(rest << 1)
    significand = _interpolate(_RCP, _RCP_BIAS, fraction >> 16, -rest, square)
    # 2^24, of a fraction of 0, carries to the exponent.
    result = ((253 - exponent) << 23) + significand - _IMPLICIT
    result = jnp.where(result < _IMPLICIT, 0, result)
    result = jnp.where(exponent == 0, _I(0x7F800000), result)
    result = jnp.where(exponent == 255, 0, result).astype(jnp.uint32)
    result |= x & np.uint32(1 << 31)
    return jnp.where((exponent == 255) & (fraction != 0), f32.NAN, result)


@jax.jit
def ex2(x: Bits) -> Bits:
    """2^x. Subnormal operands and results count as zero."""
    exponent, fraction = _biased_exponent(x), _fraction(x)
    is_negative = (x >> 31) != 0
    mantissa = fraction | _IMPLICIT
    # |x| in fixed point, with 23 bits behind the point; further bits are cut.
    left, right = jnp.clip(exponent - 127, 0, 7), jnp.clip(127 - exponent, 0, 25)
    fixed = (mantissa << left) >> right
    # A negative x is floor(x) and the rest, which is short of it by 2^-23 unless it is 0.
    whole, fraction = fixed >> 23, fixed & (_IMPLICIT - 1)
    is_short = is_negative & (fraction != 0)
    whole = jnp.where(is_negative, -whole, whole) - is_short.astype(jnp.int32)
    fraction = jnp.where(is_short, _IMPLICIT - 1 - fraction, fraction)
    rest = fraction & _I(0x1FFFF)
    significand = _interpolate(_EX2, _EX2_BIAS, fraction >> 17, rest, _square(rest))
    result = ((whole + 127) << 23) + significand - _IMPLICIT
    result = jnp.where(result < _IMPLICIT, 0, result)
    is_large = exponent >= 127 + 7
    result = jnp.where(is_large | (result > _I(0x7F800000)), _I(0x7F800000), result)
    result = jnp.where(is_large & is_negative, 0, result).astype(jnp.uint32)
    is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return jnp.where(is_nan, f32.NAN, result)


def _biased_exponent(x: Bits) -> jax.Array:
    return ((x >> 23) & np.uint32(255)).astype(jnp.int32)


def _fraction(x: Bits) -> jax.Array:
    return (x & np.uint32((1 << 23) - 1)).astype(jnp.int32)


def _square(x: jax.Array) -> jax.Array:
    """About x * x / 2^19, for x of 17 bits."""
    total = jnp.zeros_like(x)
    for i in range(17):
        total += jnp.where((x >> i) & 1 == 1, x >> (18 - i), 0)
    return total >> 1


def _interpolate(
    table: np.ndarray, bias: int, row: jax.Array, rest: jax.Array, square: jax.Array
) -> jax.Array:
    """(2^13 c0 + c1 rest + c2 square + bias) >> 15, for a |rest| of 17 bits.

    The sum has 39 bits. c1 rest is 2^8 high + low; what is below 2^8 after all else is added to low
    reaches no bit of the result.
    """
    c0, c1, c2 = (jnp.asarray(column)[row] for column in table)
    high = c1 * (rest >> 8)
    low = c1 * (rest & 255) + c2 * square + ((c0 & 3) << 13) + bias
    return (c0 >> 2) + ((high + (low >> 8)) >> 7)
