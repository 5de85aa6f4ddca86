"""gated, gated_grad: h = act(gate) * up of a gated MLP, and its gradient, in plain JAX and f32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.activation import Activation, ClampedSwiglu


def gated(gate_up: jax.Array, activation: Activation = "silu") -> jax.Array:
    """Returns h, f32 (m, f), for gate_up (m, 2 f) = [gate, up]."""
    gate, up = _halves(gate_up)
    if isinstance(activation, ClampedSwiglu):
        return _clamped_swiglu(activation, gate, up)
    return _ACTIVATIONS[activation](gate) * up


def gated_grad(gate_up: jax.Array, dh: jax.Array, activation: Activation = "silu") -> jax.Array:
    """Returns [dgate, dup], f32 (m, 2 f), for the cotangent dh (m, f) of h."""
    dh = dh.astype(jnp.float32)
    if activation != "silu":
        function = partial(gated, activation=activation)
        return jax.vjp(function, gate_up.astype(jnp.float32))[1](dh)[0]
    gate, up = _halves(gate_up)
    sigma = jax.nn.sigmoid(gate)
    silu = gate * sigma
    dgate = dh * up * (sigma + silu * (1 - sigma))
    return jnp.concatenate([dgate, dh * silu], axis=1)


def _halves(gate_up: jax.Array) -> Sequence[jax.Array]:
    return jnp.split(gate_up.astype(jnp.float32), 2, axis=1)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    # (1 + tanh(z)) / 2 = sigmoid(2 z), which does not cancel where x is far below 0.
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * (x * x * x)))


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": _gelu_tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def _clamped_swiglu(how: ClampedSwiglu, gate: jax.Array, up: jax.Array) -> jax.Array:
    limit, alpha, up_offset = map(float, (how.limit, how.alpha, how.up_offset))
    # Not minimum and maximum, whose derivative at the bound is half that of the formula.
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return gate * jax.nn.sigmoid(alpha * gate) * (up + up_offset)
