"""The gated activations with the bits of the CUDA kernels: ffi/cuda/quantize/swiglu.cuh and
activation.cuh, operation by operation. Numbers are the bits of f32."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm._data.activation import Activation, ClampedSwiglu
from jax_fp8gemm._data.kept_rounding import widened
from jax_fp8gemm._emulation import f32
from jax_fp8gemm._emulation.approximations import ex2, rcp
from jax_fp8gemm._emulation.f32 import Bits, add, constant, fma, mul


def gated(gate_up: jax.Array, activation: Activation = "silu") -> jax.Array:
    """Returns h, f32 (m, f), for gate_up (m, 2 f) = [gate, up]."""
    gate, up = _halves(gate_up)
    act = _act(activation, gate, up)
    return f32.from_bits(mul(act.value, act.factor))


def gated_grad(gate_up: jax.Array, dh: jax.Array, activation: Activation = "silu") -> jax.Array:
    """Returns [dgate, dup], f32 (m, 2 f), for the cotangent dh (m, f) of h."""
    gate, up = _halves(gate_up)
    dh_bits = f32.to_bits(widened(dh))
    act = _act(activation, gate, up)
    dgate = mul(mul(dh_bits, act.factor), act.slope)
    dup = mul(dh_bits, act.value)
    if isinstance(activation, ClampedSwiglu):
        limit = activation.limit
        dgate = jnp.where(_is_above(gate, limit), np.uint32(0), dgate)
        dup = jnp.where(_is_above(_size(up), limit), np.uint32(0), dup)
    return f32.from_bits(jnp.concatenate([dgate, dup], axis=1))


class _Act(NamedTuple):
    """act(gate), its derivative, and what act(gate) is multiplied by: up, or what becomes of it."""

    value: Bits
    slope: Bits
    factor: Bits


def _halves(gate_up: jax.Array) -> list[Bits]:
    return jnp.split(f32.to_bits(widened(gate_up)), 2, axis=1)


def _act(activation: Activation, gate: Bits, up: Bits) -> _Act:
    if isinstance(activation, ClampedSwiglu):
        return _clamped(activation, gate, up)
    return _Act(*_ACTIVATIONS[activation](gate), up)


# Comparisons are of integers: XLA's of floats takes subnormal numbers for zeros on a CPU.


def _order(x: Bits) -> jax.Array:
    """Integers ordered as the numbers are, with -0 below 0."""
    signed = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(signed < 0, signed ^ np.int32(0x7FFFFFFF), signed)


def _is_above(x: Bits, bound: float) -> jax.Array:
    return (_order(x) > _order(jnp.asarray(constant(bound)))) & ~_is_nan(x)


def _is_nan(x: Bits) -> jax.Array:
    return _size(x) > np.uint32(0x7F800000)


def _size(x: Bits) -> Bits:
    return x & np.uint32(0x7FFFFFFF)


def _minimum(x: Bits, bound: float) -> Bits:
    """min.NaN: a NaN stays one."""
    return jnp.where(_is_above(x, bound), constant(bound), x)


def _maximum(x: Bits, bound: float) -> Bits:
    """max.NaN: a NaN stays one."""
    return jnp.where(_is_above(x, bound) | _is_nan(x), x, constant(bound))


def _clamp(x: Bits, bound: float) -> Bits:
    """fminf(fmaxf(x, -bound), bound): -bound for a NaN."""
    return _minimum(jnp.where(_is_above(x, -bound), x, constant(-bound)), bound)


def _negative(x: Bits) -> Bits:
    return x ^ np.uint32(1 << 31)


def _fma(a: Bits | np.uint32, b: Bits | np.uint32, c: Bits | np.uint32) -> Bits:
    """fma with constants."""
    return fma(*jnp.broadcast_arrays(a, b, c))


def _mul(x: Bits, factor: float) -> Bits:
    return mul(x, jnp.full_like(x, constant(factor)))


def _bounded_sigmoid(x: Bits) -> tuple[Bits, Bits]:
    """sigma and 1 - sigma."""
    power = _mul(x, -1.44269502)
    lost = _fma(power, constant(-0.693147182), _negative(x))
    exp = ex2(power)
    exp = fma(exp, lost, exp)
    sigma = rcp(_fma(exp, f32.one, f32.one))
    return sigma, mul(exp, sigma)


def _silu_of(gate: Bits, scaled_gate: Bits, alpha: float) -> tuple[Bits, Bits]:
    """gate * sigmoid(scaled_gate) and its derivative by gate, for scaled_gate = alpha * gate."""
    sigma, rest = _bounded_sigmoid(_clamp(scaled_gate, 87.5))
    silu = mul(gate, sigma)
    scaled_silu = silu if alpha == 1 else _mul(silu, alpha)
    return silu, fma(scaled_silu, rest, sigma)


def _silu(x: Bits) -> tuple[Bits, Bits]:
    return _silu_of(x, x, 1.0)


def _clamped(how: ClampedSwiglu, gate: Bits, up: Bits) -> _Act:
    limit, alpha, offset = (float(np.float32(x)) for x in (how.limit, how.alpha, how.up_offset))
    gate = _minimum(gate, limit)
    factor = _minimum(_maximum(up, -limit), limit)
    scaled_gate = gate if alpha == 1 else _mul(gate, alpha)
    # A -0 is an offset too.
    if constant(offset) != 0:
        factor = add(factor, jnp.full_like(factor, constant(offset)))
    return _Act(*_silu_of(gate, scaled_gate, alpha), factor)


_GELU = (
    *(0.105600186, 0.107832171, 0.0829695687, 0.14243637),
    *(-0.0662885234, 0.195224091, -0.067774184),
)


def _gelu(x: Bits) -> tuple[Bits, Bits]:
    size = _size(x)
    q = rcp(_fma(constant(0.265), size, f32.one))
    polynomial = jnp.full_like(x, constant(_GELU[6]))
    for coefficient in _GELU[5::-1]:
        polynomial = _fma(polynomial, q, constant(coefficient))
    exp = ex2(_mul(mul(x, x), -0.72134752))
    r = mul(q, polynomial)
    tail = mul(exp, r)
    slope = mul(exp, _fma(constant(-0.398942280), size, r))
    is_positive = _is_above(x, 0.0)
    value = fma(_negative(size), tail, jnp.where(is_positive, x, np.uint32(0)))
    return value, jnp.where(is_positive, _fma(f32.one, _negative(slope), f32.one), slope)


def _gelu_tanh(x: Bits) -> tuple[Bits, Bits]:
    first, third = np.float32(1.59576912), 0.0713548163
    clamped = _clamp(x, 10.01)
    z = mul(clamped, _fma(mul(clamped, clamped), constant(third), constant(float(first))))
    sigma, rest = _bounded_sigmoid(z)
    x_dz = _fma(x, constant(float(-2 * first)), _mul(z, 3.0))
    return mul(x, sigma), fma(mul(sigma, rest), x_dz, sigma)


def _relu2(x: Bits) -> tuple[Bits, Bits]:
    relu = _maximum(x, 0.0)
    return mul(relu, relu), add(relu, relu)


_ACTIVATIONS: dict[str, Callable[[Bits], tuple[Bits, Bits]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}
