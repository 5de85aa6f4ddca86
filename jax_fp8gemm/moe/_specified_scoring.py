"""The scores of _scoring.py with specified bits: those of a token depend on its logits alone.

The score of a logit x is exp(l) * r, and a row is divided by its sum where it is normalised:

                  l              r
    softmax       x              1                                        always normalised
    sigmoid       min(x, 0)      1 / (1 + exp(-|x|))
    sqrtsoftplus  min(x, 0) / 2  sqrt(log(1 + exp(x)) / exp(min(x, 0)))

exp(l) is taken relative to the largest l of the row, so a ratio survives the underflow of all
scores. All of it is integer arithmetic (_wide.py, _wide_functions.py). The derivative is, for
cotangents g,

    dx = w * d * (g - sum(g * w))     where w is normalised; else without the sum
    d  = the derivative of log(exp(l) * r) by x
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm._ops.reverse_mode import only_once
from jax_fp8gemm.moe import _wide as wide
from jax_fp8gemm.moe import _wide_functions as functions
from jax_fp8gemm.moe._scoring import Scoring
from jax_fp8gemm.moe._wide import Wide

_U = np.uint32
_SIGN = _U(1 << 31)
_INF = _U(0x7F800000)
# Beyond it, exp(-x) counts as zero. Its f32 is zero from 88 on, and units of `fixed` end at 128.
_FAR = np.float32(112)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def scores(logits: jax.Array, scoring: Scoring, normalize: bool, scale: float) -> jax.Array:
    """Returns scale * the scores (..., k) of f32 logits (..., k).

    They are divided by their sum if normalize, and those of a softmax in any case. Each is rounded
    once. A score below 2^-126 is 0.
    """
    return _scaled_scores(logits, scoring, normalize, scale)


# Jitted for calls outside jit, which would otherwise run a thousand operations one by one.
@partial(jax.jit, static_argnums=(1, 2, 3))
def _scaled_scores(logits: jax.Array, scoring: Scoring, normalize: bool, scale: float) -> jax.Array:
    bits = wide.to_bits(logits)
    score = _scores(bits, scoring, normalize)
    out = wide.to_f32(wide.mul(score, _scale_like(score, scale)))
    return wide.from_bits(_with_specials(bits, out, scoring, normalize))


def _fwd(logits: jax.Array, scoring: Scoring, normalize: bool, scale: float):
    weights = scores(logits, scoring, normalize, 1.0)
    out = weights if scale == 1 else scores(logits, scoring, normalize, scale)
    return out, (logits, weights)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _bwd(scoring: Scoring, normalize: bool, scale: float, kept, dout: jax.Array):
    logits, weights, dout = only_once("route", *kept, dout)
    bits, weight_bits, dout_bits = map(wide.to_bits, (logits, weights, dout))
    weight, size = wide.magnitude(weight_bits), wide.magnitude(dout_bits)
    size, sign = wide.mul(size, _scale_like(size, scale)), _signs(dout_bits)
    if normalize or scoring == "softmax":
        sum_sign, sum_ = wide.total(sign, wide.mul(size, weight))
        pair = [(sign, size), (-sum_sign, sum_)]
        stack = lambda x, y: jnp.stack([x, jnp.broadcast_to(y, x.shape)], axis=-1)
        sign, size = wide.total(*jax.tree.map(stack, *pair))
        sign, size = jax.tree.map(lambda x: x[..., 0], (sign, size))
    dx = wide.mul(wide.mul(weight, _slope_of_log(bits, scoring)), size)
    dx_bits = wide.to_f32(dx) | jnp.where(sign < 0, _SIGN, _U(0))
    is_bad = _is_special(dout_bits) | _is_special(weight_bits)
    if normalize or scoring == "softmax":
        is_bad = jnp.any(is_bad, axis=-1, keepdims=True)
    return (wide.from_bits(jnp.where(is_bad, wide.NAN, dx_bits)),)


scores.defvjp(_fwd, _bwd)


def _scores(bits: jax.Array, scoring: Scoring, normalize: bool) -> Wide:
    log, rest = _log_and_rest(bits, scoring)
    if scoring != "softmax" and not normalize:
        power = _exp_of_negative_size(log)
        return power if rest is None else wide.mul(power, rest)
    order = _order(log)
    top = _order(jnp.max(order, axis=-1, keepdims=True))
    top, log = (lax.bitcast_convert_type(x, jnp.uint32) for x in (top, _order(order)))
    # Where the difference is about _FAR, either choice gives a weight of zero.
    is_far = wide.from_bits(top) - wide.from_bits(log) > _FAR
    power = _exp_of_negative(functions.fixed(top) - functions.fixed(log), is_far)
    terms = power if rest is None else wide.mul(power, rest)
    return wide.div(terms, wide.total(jnp.ones_like(terms.exponent), terms)[1])


def _log_and_rest(bits: jax.Array, scoring: Scoring) -> tuple[jax.Array, Wide | None]:
    """Returns the bits of l, and r; None is 1."""
    if scoring == "softmax":
        return bits, None
    is_negative = bits >= _SIGN
    log = jnp.where(is_negative, bits, _U(0))
    exp = _exp_of_negative_size(bits)  # of -|x|
    if scoring == "sigmoid":
        return log, _sigmoid_of_size(exp)
    exponent = (bits >> 23) & _U(255)
    half = jnp.where(exponent == 255, log, log - _U(1 << 23))
    return jnp.where(exponent < 2, _U(0), jnp.where(is_negative, half, _U(0))), functions.sqrt(
        _softplus(bits, exp)
    )


def _sigmoid_of_size(exp: Wide) -> Wide:
    """Returns 1 / (1 + exp)."""
    one = wide.power_of_two(0, exp)
    return wide.div(one, wide.add(one, exp))


def _softplus(bits: jax.Array, exp: Wide) -> Wide:
    """Returns log(1 + exp(x)), divided by exp(x) where x is negative; exp is that of -|x|."""
    ratio = functions.log1p_over(exp)
    whole = wide.add(wide.magnitude(bits), wide.mul(exp, ratio))
    return jax.tree.map(partial(jnp.where, bits >= _SIGN), ratio, whole)


def _slope_of_log(bits: jax.Array, scoring: Scoring) -> Wide:
    """Returns d: 1; 1 - sigmoid(x); sigmoid(x) / (2 log(1 + exp(x)))."""
    exp = _exp_of_negative_size(bits)
    if scoring == "softmax":
        return wide.power_of_two(0, exp)
    upper = _sigmoid_of_size(exp)  # of |x|
    if scoring == "sigmoid":
        is_small = bits < _SIGN
        return jax.tree.map(partial(jnp.where, is_small), wide.mul(exp, upper), upper)
    slope = wide.div(upper, _softplus(bits, exp))
    return slope._replace(exponent=slope.exponent - np.int32(1))


def _exp_of_negative_size(bits: jax.Array) -> Wide:
    """Returns exp(-|x|)."""
    size = bits & ~_SIGN
    return _exp_of_negative(functions.fixed(size), size >= _FAR.view(np.uint32))


def _exp_of_negative(units: jax.Array, is_far: jax.Array) -> Wide:
    exp = functions.exp_of_negative(units)
    zero = wide.magnitude(jnp.zeros_like(units))
    return jax.tree.map(partial(jnp.where, is_far), zero, exp)


def _scale_like(x: Wide, scale: float) -> Wide:
    return wide.magnitude(jnp.full_like(x.mantissa, np.float32(scale).view(np.uint32)))


def _order(x: jax.Array) -> jax.Array:
    """Turns bits of floats, or int32, to int32 that order as the floats do, and back."""
    x = lax.bitcast_convert_type(x, jnp.int32)
    return x ^ ((x >> 31) & np.int32(0x7FFFFFFF))


def _signs(bits: jax.Array) -> jax.Array:
    return jnp.where(bits >= _SIGN, np.int32(-1), np.int32(1))


def _is_special(bits: jax.Array) -> jax.Array:
    return (bits & _INF) == _INF


def _with_specials(bits: jax.Array, out: jax.Array, scoring: Scoring, normalize: bool) -> jax.Array:
    """Returns `out` with what IEEE arithmetic makes of Inf and NaN among the logits."""
    is_nan = (bits & ~_SIGN) > _INF
    is_inf, is_minus_inf = bits == _INF, bits == (_INF | _SIGN)
    if normalize or scoring == "softmax":
        # A row of scores 0, or with an infinite one, has no ratios.
        is_bad = is_nan if scoring == "sigmoid" else is_nan | is_inf
        is_bad = jnp.any(is_bad, axis=-1, keepdims=True)
        is_bad |= jnp.all(is_minus_inf, axis=-1, keepdims=True)
        return jnp.where(is_bad, wide.NAN, jnp.where(is_minus_inf, _U(0), out))
    infinite = _U(0x3F800000) if scoring == "sigmoid" else _INF
    out = jnp.where(is_inf & (scoring == "sqrtsoftplus"), infinite, out)
    return jnp.where(is_nan, wide.NAN, jnp.where(is_minus_inf, _U(0), out))
