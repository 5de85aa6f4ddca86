"""gated, gated_grad: h = act(gate) * up of a gated MLP, and its gradient, in plain JAX and f32.

gate | up may be laid out in pieces, so that a mesh can cut it between features: of p pieces,
[gate_0 | up_0 | gate_1 | up_1 | ...], number i has features i f / p to (i + 1) f / p - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8gemm._data.activation import Activation, ClampedSwiglu


def gated(gate_up: jax.Array, activation: Activation = "silu") -> jax.Array:
    """Returns h, f32 (m, f), for gate_up (m, 2 f) = [gate, up]."""
    return activate(*halves(gate_up), activation)


def activate(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """Returns act(gate) * up of f32 (m, f), or what the formula of the activation says."""
    if isinstance(activation, ClampedSwiglu):
        return _clamped_swiglu(activation, gate, up)
    return _ACTIVATIONS[activation](gate) * up


def gated_grad(gate_up: jax.Array, dh: jax.Array, activation: Activation = "silu") -> jax.Array:
    """Returns [dgate, dup], f32 (m, 2 f), for the cotangent dh (m, f) of h."""
    dh = dh.astype(jnp.float32)
    if activation != "silu":
        function = partial(gated, activation=activation)
        return jax.vjp(function, gate_up.astype(jnp.float32))[1](dh)[0]
    gate, up = halves(gate_up)
    sigma = jax.nn.sigmoid(gate)
    silu = gate * sigma
    dgate = dh * up * (sigma + silu * (1 - sigma))
    return jnp.concatenate([dgate, dh * silu], axis=1)


def without_pieces(x: jax.Array, pieces: int, dim: int) -> jax.Array:
    """Returns [gate | up] along this dimension, for `x` laid out in pieces."""
    return _exchange(x, (pieces, 2), dim)


def in_pieces(x: jax.Array, pieces: int, dim: int) -> jax.Array:
    """Returns `x`, which is [gate | up] along this dimension, laid out in pieces."""
    return _exchange(x, (2, pieces), dim)


def _exchange(x: jax.Array, parts: tuple[int, int], dim: int) -> jax.Array:
    if 1 in parts:
        return x
    features = x.shape[dim] // (parts[0] * parts[1])
    divided = x.reshape(*x.shape[:dim], *parts, features, *x.shape[dim + 1 :])
    return divided.swapaxes(dim, dim + 1).reshape(x.shape)


def halves(gate_up: jax.Array, pieces: int = 1) -> tuple[jax.Array, jax.Array]:
    """Returns gate and up, f32 (m, f), of gate_up (m, 2 f), which is laid out in pieces."""
    gate, up = jnp.split(without_pieces(gate_up.astype(jnp.float32), pieces, 1), 2, axis=1)
    return gate, up


_exact_gelu = partial(jax.nn.gelu, approximate=False)


# NOTE: JAX 0.12.0 cannot differentiate erfc in a shard_map that checks over which axes values vary.
@jax.custom_jvp
def _gelu_with_slope(x: jax.Array) -> jax.Array:
    return _exact_gelu(x)


@_gelu_with_slope.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]):
    (x,), (dx,) = primals, tangents
    root_half = np.sqrt(0.5).astype(x.dtype)
    below = 0.5 * jax.lax.erfc(-x * root_half)  # the share of a normal distribution below x
    density = jnp.exp(-jnp.square(x * root_half)) / math.sqrt(2 * math.pi)
    return _exact_gelu(x), dx * (below + x * density)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    # (1 + tanh(z)) / 2 = sigmoid(2 z), which does not cancel where x is far below 0.
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * (x * x * x)))


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu": _exact_gelu if jax.__version_info__ < (0, 12) else _gelu_with_slope,
    "gelu_tanh": _gelu_tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def _clamped_swiglu(how: ClampedSwiglu, gate: jax.Array, up: jax.Array) -> jax.Array:
    limit, alpha, up_offset = map(float, (how.limit, how.alpha, how.up_offset))
    # Not minimum and maximum, whose derivative at the bound is half that of the formula.
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return gate * jax.nn.sigmoid(alpha * gate) * (up + up_offset)
