"""What the programs of converted models hold, and how such models train."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params

# The primitives of products: ours, and JAX's.
OURS = {"jax_fp8gemm_gemm": "gemm", "jax_fp8gemm_grouped_gemm": "grouped_gemm"}
PRODUCTS = OURS | {"dot_general": "dot_general", "ragged_dot_general": "ragged_dot"}


def products(function: Callable[..., Any], *args: Any) -> Counter[str]:
    """Returns how many products of each kind the program of `function` has."""
    return Counter(_products(jax.make_jaxpr(function)(*args).jaxpr))


def _products(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCTS:
            yield PRODUCTS[equation.primitive.name]
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner)


def train(loss: Callable[[Any], jax.Array], params: Any, num_steps: int):
    """Returns the first gradient, as one vector, and the losses of `num_steps` steps of Adam."""
    optimizer = optax.adam(3e-3)

    def step(carry, _):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), (value, gradient)

    first = params, optimizer.init(params)
    _, (losses, gradients) = jax.jit(lambda: jax.lax.scan(step, first, length=num_steps))()
    vector = np.concatenate(
        [np.asarray(x[0], np.float64).ravel() for x in jax.tree.leaves(gradients)]
    )
    return vector, np.asarray(losses)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return a @ b / np.sqrt((a @ a) * (b @ b))


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
