"""The bits of a batch-invariant router in NumPy, from docs/numerics.md; imports nothing of the
package.

A number is (mantissa, exponent) with the value mantissa * 2^(exponent - 31): a mantissa in
[2^31, 2^32), or 0, as uint64, and an exponent as int64.
"""

import numpy as np

U, I = np.uint64, np.int64
EXP2 = (0xB17217F9, 0x3D7F7BA6, 0x0E3589F8, 0x02763464, 0x0057BF1A, 0x00099317, 0x00015BD3)
ARCTANH = (0x55555564, 0x33331A4B, 0x24992DA4, 0x1BC86581, 0x1DBBCF2F)
LOG2_E = 0xB8AA3B29


def bits_of(x):
    return np.asarray(x, np.float32).view(np.uint32).astype(U)


def _length(x):
    """The number of bits of each integer below 2^53."""
    return np.frexp(x.astype(np.float64))[1]


def _shifted(x, by):
    """x * 2^by, by from -63 on, cut to an integer."""
    by = np.clip(by, -63, 63)
    return np.where(by >= 0, x << np.maximum(by, 0).astype(U), x >> np.maximum(-by, 0).astype(U))


def normalised(mantissa, exponent):
    shift = 32 - _length(mantissa)
    return _shifted(mantissa, shift), np.where(mantissa == 0, -(10**6), exponent - shift)


def of_f32(x):
    bits = bits_of(x) & U(0x7FFFFFFF)
    field = (bits >> U(23)).astype(I)
    mantissa = ((bits & U(0x7FFFFF)) | U(1 << 23)) << U(8)
    is_zero = field == 0
    return np.where(is_zero, U(0), mantissa), np.where(is_zero, -(10**6), field - 127)


def to_f32(x):
    """To nearest even; below 2^-126 it is 0."""
    mantissa, exponent = x
    quotient, rest = mantissa >> U(8), mantissa & U(255)
    is_up = (rest > 128) | ((rest == 128) & (quotient & U(1) == 1))
    with np.errstate(over="ignore"):
        value = np.ldexp((quotient + is_up).astype(np.float64), np.maximum(exponent, -400) - 23)
        out = value.astype(np.float32)
    return np.where(value < 2.0**-126, np.float32(0), out)


def mul(x, y):
    return normalised((x[0] * y[0]) >> U(32), x[1] + y[1] + 1)


def div(x, y):
    is_above = x[0] >= y[0]
    numerator = np.where(is_above, x[0] << U(31), x[0] << U(32))
    mantissa, exponent = numerator // y[0], x[1] - y[1] - ~is_above
    return mantissa, np.where(mantissa == 0, -(10**6), exponent)


def add(x, y):
    exponent = np.maximum(x[1], y[1])
    aligned = [_shifted(m, np.maximum(e - exponent, -63)) >> U(1) for m, e in (x, y)]
    return normalised(sum(aligned), exponent + 1)


def total(sign, x):
    exponent = x[1].max(axis=-1, keepdims=True)
    units = _shifted(x[0], np.maximum(x[1] - exponent, -63)).astype(I)
    sum_ = (sign * units).sum(axis=-1, keepdims=True)
    size = np.abs(sum_).astype(U)
    shift = np.maximum(_length(size) - 32, 0)
    return np.where(sum_ < 0, -1, 1), normalised(_shifted(size, -shift), exponent + shift)


def sqrt(x):
    is_odd = x[1] % 2
    y = x[0], is_odd
    units = x[0] >> (2 - is_odd).astype(U)
    line = (units >> U(2)) + (units >> U(4)) + (units >> U(5)) + U(370_000_000)
    root = normalised(line, np.full_like(is_odd, 2))
    for _ in range(3):
        mantissa, exponent = add(root, div(y, root))
        root = mantissa, exponent - 1
    return root[0], root[1] + (x[1] - is_odd) // 2


def _one_and(x, coefficients):
    sum_ = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        sum_ = U(c) + ((sum_ * x) >> U(32))
        assert (sum_ < 2**32).all()
    return U(1 << 31) + ((sum_ * x) >> U(33))


def exp_of_negative(t):
    """exp(-t) for f64 t >= 0, a multiple of 2^-25; from 112 on it is 0."""
    is_far = t >= 112
    units = np.where(is_far, 0, t * 2.0**25).astype(U)
    product = units * U(LOG2_E)  # units of 2^-56
    fraction = (product >> U(24)) & U(0xFFFFFFFF)
    rest = (U(2**32) - fraction) & U(0xFFFFFFFF)
    exponent = -(product >> U(56)).astype(I) - (fraction != 0)
    mantissa = _one_and(rest, EXP2)
    return np.where(is_far, U(0), mantissa), np.where(is_far, -(10**6), exponent)


def _in_units(x):
    """x to the nearest multiple of 2^-25, half away from zero, in f64."""
    x = np.asarray(x, np.float32).astype(np.float64)
    return np.sign(x) * np.floor(np.abs(x) * 2.0**25 + 0.5) / 2.0**25


def _power_of_two(exponent, like):
    return np.full_like(like[0], 2**31), np.full_like(like[1], exponent)


def _parts(x, scoring):
    """l in f32 and r of each logit; an r of 1 is None."""
    exp = exp_of_negative(np.abs(_in_units(x)))
    one = _power_of_two(0, exp)
    negative = np.minimum(x, 0)
    if scoring == "softmax":
        return x, None
    if scoring == "sigmoid":
        return negative, div(one, add(one, exp))
    return np.where(np.abs(negative) < 2.0**-125, 0, negative / 2), sqrt(softplus(x, exp))


def softplus(x, exp):
    """log(1 + exp(x)), divided by exp(x) for negative x."""
    bottom = add(_power_of_two(1, exp), exp)
    z = div(exp, bottom)
    units = _shifted(z[0], np.maximum(z[1] + 1, -63))
    series = _one_and((units * units) >> U(32), ARCTANH), np.full_like(exp[1], 1)
    ratio = div(series, bottom)
    whole = add(of_f32(x), mul(exp, ratio))
    is_negative = np.signbit(x)
    return tuple(np.where(is_negative, a, b) for a, b in zip(ratio, whole, strict=True))


def scores(x, scoring, normalize, scale=1.0):
    """For finite f32 x (..., k)."""
    log, rest = _parts(x, scoring)
    if normalize or scoring == "softmax":
        units = _in_units(log)
        terms = exp_of_negative(units.max(axis=-1, keepdims=True) - units)
        terms = terms if rest is None else mul(terms, rest)
        terms = div(terms, total(np.ones_like(terms[1]), terms)[1])
    else:
        terms = mul(exp_of_negative(-_in_units(log)), rest)
    return to_f32(mul(terms, of_f32(np.full_like(x, scale))))


def gradient(x, dout, scoring, normalize, scale=1.0):
    """That of finite logits for the cotangent of scores."""
    weight, size = of_f32(scores(x, scoring, normalize)), of_f32(dout)
    size, sign = mul(size, of_f32(np.full_like(x, scale))), np.where(np.signbit(dout), -1, 1)
    if normalize or scoring == "softmax":
        sum_sign, sum_ = total(sign, mul(size, weight))
        pairs = ((a, np.broadcast_to(b, a.shape)) for a, b in zip(size, sum_, strict=True))
        size = tuple(np.stack(pair, axis=-1) for pair in pairs)
        sign = np.stack([sign, np.broadcast_to(-sum_sign, sign.shape)], axis=-1)
        sign, size = total(sign, size)
        sign, size = sign[..., 0], tuple(part[..., 0] for part in size)
    dx = to_f32(mul(mul(weight, _slope(x, scoring)), size))
    return np.where(sign < 0, -dx, dx)


def _slope(x, scoring):
    exp = exp_of_negative(np.abs(_in_units(x)))
    one = _power_of_two(0, exp)
    upper = div(one, add(one, exp))
    if scoring == "softmax":
        return one
    if scoring == "sigmoid":
        pair = zip(upper, mul(exp, upper), strict=True)
        return tuple(np.where(np.signbit(x), a, b) for a, b in pair)
    mantissa, exponent = div(upper, softplus(x, exp))
    return mantissa, exponent - 1
