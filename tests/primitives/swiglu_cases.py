"""SwiGLU in float64, and how far FP8 values and scales made of it in f32 may be from it."""

import numpy as np
import reference
from reference import E4M3, E5M2

# Of an element in f32, relative to the sum of the magnitudes of its terms: sigma 6e-7 by ex2, rcp
# and the roundings around them, then up to five roundings of 6e-8.
ELEMENT_ERROR = 1e-6


def truth(operands):
    """What is quantised, and the sum of the magnitudes of its terms, in float64."""
    gate, up = np.split(operands[0].astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        sigma = 1 / (1 + np.exp(-gate))
    silu = gate * sigma
    if len(operands) == 1:
        return silu * up, np.abs(silu * up)
    dh = operands[1].astype(np.float64)
    slope, rest = dh * up, silu * (1 - sigma)
    x = np.concatenate([slope * (sigma + rest), dh * silu], axis=1)
    magnitudes = [np.abs(slope) * (sigma + np.abs(rest)), np.abs(dh * silu)]
    return x, np.concatenate(magnitudes, axis=1)


def in_columns(x, sizes, first_row):
    """x^T with each group at a multiple of 128 columns, zeros elsewhere, and which are tokens."""
    m, n = x.shape
    t = (m + 127 * len(sizes)) // 128 * 128
    columns, is_token = np.zeros((n, t)), np.zeros(t, bool)
    start = 0
    for first, last in reference.row_ranges(sizes, m, first_row):
        group = slice(start, start + last - first)
        columns[:, group], is_token[group] = x[first:last].T, True
        start += -(-(last - first) // 128) * 128
    return columns, is_token


def block_max(x):
    """Of each 1x128 block of x >= 0."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 128)))
    return padded.reshape(x.shape[0], padded.shape[1] // 128, 128).max(axis=2)


def per_element(scale, width):
    """The f64 scale of each element of rows of `width`."""
    return np.repeat(scale.astype(np.float64), 128, axis=1)[:, :width]


def half_step(scaled, fmt):
    """Half the distance of FP8 neighbours around `scaled`."""
    mantissa_bits, smallest = {E4M3: (3, -6), E5M2: (2, -14)}[fmt]
    exponent = np.where(scaled == 0, smallest, np.frexp(scaled)[1] - 1)
    return np.exp2(np.maximum(exponent, smallest) - mantissa_bits - 1.0)


def _power_of_two_at_least(x):
    fraction, exponent = np.frexp(x)
    return np.ldexp(1.0, exponent - (fraction == 0.5))


def assert_nearest(q, x, magnitude, fmt, pow2, what, element_error=ELEMENT_ERROR):
    """The scales of x, up to element_error; FP8 values nearest to x / scale, up to twice that:
    beside the error of x, that of 1 / scale and of the product. Either shows in a value only where
    x / scale is that close to halfway between FP8 neighbours."""
    values, scale = np.asarray(q.values), np.asarray(q.scale)
    assert (values.dtype, values.shape) == (fmt, x.shape), what
    fmax = reference.FORMAT_MAX[fmt]
    smallest = float(reference.SMALLEST_AMAX)
    expected = np.maximum(block_max(np.abs(x)), smallest) / fmax
    error = element_error * np.maximum(block_max(magnitude), smallest) / fmax
    low, high = expected - error, expected + error
    if pow2:
        low, high = _power_of_two_at_least(low), _power_of_two_at_least(high)
    is_right = (low <= scale) & (scale <= high)
    assert is_right.all(), (what, np.argwhere(~is_right)[:3], scale[~is_right][:3], low[~is_right])
    spread = per_element(scale, x.shape[1])
    scaled = x / spread
    distance = np.abs(values.astype(np.float64) - scaled)
    is_nearest = distance <= half_step(scaled, fmt) + 2 * element_error * magnitude / spread
    assert is_nearest.all(), (what, np.argwhere(~is_nearest)[:3], scaled[~is_nearest][:3])
