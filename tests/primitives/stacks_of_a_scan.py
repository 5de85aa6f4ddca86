"""Layers in a scan, for tests of what it stacks: what the backward pass reads, and gradients."""

import jax
import jax.numpy as jnp

from jax_fp8gemm import checkpoint_policies, matmul, moe

NUM_LAYERS = 3
GROUPS = 4


def dense(x, weights, **how):
    """Two products with an activation between; x (m, k), weights (k, n) and (n, k)."""
    up, down = weights
    return x + matmul(jax.nn.silu(matmul(x, up, **how)), down, **how)


def experts(x, weights, **how):
    """The MLPs of groups of rows; weights (g, d, 2 f) and (g, f, d)."""
    sizes = jnp.full((GROUPS,), len(x) // GROUPS, jnp.int32)
    return x + moe.moe_mlp(x, *weights, sizes, **how)


LAYERS = {"dense": dense, "experts": experts}
REMAT = {
    "kept": lambda layer: layer,
    "repeated": lambda layer: jax.checkpoint(layer, prevent_cse=False),
    "quantised kept": lambda layer: jax.checkpoint(
        layer, policy=checkpoint_policies.save_quantized, prevent_cse=False
    ),
}


def weight_shapes(name, d, f):
    """The shapes of a layer's weights, for x (m, d)."""
    return [(d, f), (f, d)] if name == "dense" else [(GROUPS, d, 2 * f), (GROUPS, f, d)]


def gradients(layer, weights, x, is_unrolled=False):
    """The gradients of stacked weights (layers, ...) and of x."""

    def loss(weights, x):
        if is_unrolled:
            for i in range(NUM_LAYERS):
                x = layer(x, [w[i] for w in weights])
        else:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return jnp.square(x.astype(jnp.float32)).mean()

    return jax.grad(loss, argnums=(0, 1))(weights, x)
