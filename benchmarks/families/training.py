"""A training step: the loss, its gradients, and Adam. Weights are bf16, both moments f32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_LEARNING_RATE, _DECAYS, _EPSILON = 1e-4, (0.9, 0.95), 1e-8


class State(NamedTuple):
    """Of training: weights in any tree, both moments in the same. Or where these lie."""

    weights: Any
    means: Any
    squares: Any
    step: Any


def new_state(weights: Any) -> State:
    zeros = lambda: jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    return State(weights, zeros(), zeros(), jnp.int32(0))


def train(loss: Callable[..., jax.Array], state: State, x: jax.Array, target: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(state.weights, x, target)
    step = state.step + 1
    corrections = [1 - decay ** step.astype(jnp.float32) for decay in _DECAYS]

    def update(w, gradient, mean, square):
        gradient = gradient.astype(jnp.float32)
        mean = _DECAYS[0] * mean + (1 - _DECAYS[0]) * gradient
        square = _DECAYS[1] * square + (1 - _DECAYS[1]) * gradient**2
        change = mean / corrections[0] / (jnp.sqrt(square / corrections[1]) + _EPSILON)
        return (w.astype(jnp.float32) - _LEARNING_RATE * change).astype(w.dtype), mean, square

    updated = jax.tree.map(update, state.weights, gradients, state.means, state.squares)
    outer, inner = jax.tree.structure(state.weights), jax.tree.structure((0, 0, 0))
    weights, means, squares = jax.tree.transpose(outer, inner, updated)
    return State(weights, means, squares, step), value
