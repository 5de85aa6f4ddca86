"""Gated activations and their gradients in NumPy and float64, from their published formulas."""

import numpy as np
from scipy.special import erfc

from jax_fp8gemm.moe import ClampedSwiglu

DEEPSEEK_V4 = ClampedSwiglu(10.0)
GPT_OSS = ClampedSwiglu(7.0, alpha=1.702, up_offset=1.0)
OTHERS = ("gelu", "gelu_tanh", "relu2", DEEPSEEK_V4, GPT_OSS)  # than "silu"
NAMES = ("gelu", "gelu_tanh", "relu2", "deepseek_v4", "gpt_oss")


def _sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _value_and_slopes(x, activation):
    """act(x), and the terms whose sum is act'(x)."""
    if activation == "silu":
        sigma = _sigmoid(x)
        return x * sigma, (sigma, x * sigma * _sigmoid(-x))
    if activation == "gelu":
        phi = erfc(-x / np.sqrt(2)) / 2
        return x * phi, (phi, x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi))
    if activation == "gelu_tanh":
        # (1 + tanh(z / 2)) / 2 is sigma(z), which does not cancel where tanh is nearly -1.
        c = np.sqrt(8 / np.pi)
        z = c * (x + 0.044715 * x**3)
        slope = x * _sigmoid(z) * _sigmoid(-z) * c * (1 + 3 * 0.044715 * x * x)
        return x * _sigmoid(z), (_sigmoid(z), slope)
    return np.maximum(x, 0) ** 2, (2 * np.maximum(x, 0),)


def gated(gate, up, activation):
    """h."""
    if isinstance(activation, str):
        return _value_and_slopes(gate, activation)[0] * up
    gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    return gate * _sigmoid(activation.alpha * gate) * (up + activation.up_offset)


def gated_grad(gate, up, dh, activation):
    """dgate, dup, and the sums of the magnitudes of the terms of each."""
    if isinstance(activation, str):
        value, slopes = _value_and_slopes(gate, activation)
        is_inside, is_up_inside = np.ones_like(gate), np.ones_like(up)
    else:
        limit, alpha = activation.limit, activation.alpha
        # torch.clamp passes the gradient of what equals a bound.
        is_inside, is_up_inside = gate <= limit, np.abs(up) <= limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + activation.up_offset
        sigma = _sigmoid(alpha * gate)
        value, slopes = gate * sigma, (sigma, alpha * gate * sigma * _sigmoid(-alpha * gate))
    dgate, dup = dh * up * sum(slopes) * is_inside, dh * value * is_up_inside
    return dgate, dup, np.abs(dh * up) * sum(map(np.abs, slopes)) * is_inside, np.abs(dup)


def _error_in_tail(gate, activation):
    """How many times the error of other elements the kernel's comments allow where act(gate) is
    almost 0: 2^-16 in place of 2^-18, because the exponent of an exponential is large there."""
    if activation == "gelu":
        return np.where(gate < -8, 4, 1)
    if activation == "gelu_tanh":
        return np.where(np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3) < -20, 4, 1)
    return np.ones_like(gate)


def truth(operands, activation):
    """h of [gate_up], or [dgate, dup] of [gate_up, dh]; and the magnitudes of its terms, more where
    their error may be more."""
    gate, up = np.split(operands[0].astype(np.float64), 2, axis=1)
    more = _error_in_tail(gate, activation)
    if len(operands) == 1:
        h = gated(gate, up, activation)
        return h, np.abs(h) * more
    parts = gated_grad(gate, up, operands[1].astype(np.float64), activation)
    magnitudes = [magnitude * more for magnitude in parts[2:]]
    return np.concatenate(parts[:2], axis=1), np.concatenate(magnitudes, axis=1)
