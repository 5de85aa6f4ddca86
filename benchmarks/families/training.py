"""A training step: the loss, its gradients, and Adam. Weights are bf16, both moments f32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8gemm import master_weights

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
    return _adam(state, *jax.value_and_grad(loss)(state.weights, x, target))


def train_on_microbatches(
    loss: Callable[..., jax.Array],
    prepare: Callable[[Any], Any],
    num: int,
    state: State,
    x: jax.Array,
    target: jax.Array,
) -> Any:
    """A step on x and target in `num` parts, whose gradients are added in f32.

    prepare: makes of the weights what all parts read.
    """
    used = prepare(state.weights)

    def add(total: Any, part: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(used, *part)
        found = value, master_weights(gradients)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype) / num, total, found), None

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), (jnp.float32(0), state.weights))
    parts = [y.reshape(num, -1, y.shape[-1]) for y in (x, target)]
    return _adam(state, *jax.lax.scan(add, zeros, parts)[0])


def _adam(state: State, value: jax.Array, gradients: Any) -> tuple[State, jax.Array]:
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
