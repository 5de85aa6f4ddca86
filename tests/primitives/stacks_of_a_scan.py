"""Layers in a scan, for tests of what it stacks: what the backward pass reads, and gradients."""

import jax
import jax.numpy as jnp

import jax_fp8gemm as fp8
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
    "weights again": lambda layer: jax.checkpoint(
        layer, policy=checkpoint_policies.save_all_but_weights, prevent_cse=False
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


def sums_of_products(totals, lhs, rhs):
    """Adds a product lhs[i] (m, k) . rhs[i] (n, k) to each of the stacked totals (m, n)."""

    def add(total, *operands):
        lhs, rhs = (fp8.quantize(x) for x in operands)
        return fp8.scaled_matmul(lhs, rhs, out_dtype=jnp.float32, accumulate_into=total)

    return _stacked(add, totals, lhs, rhs)


def sums_of_gradients(totals, lhs, rhs):
    """Adds the weight gradients of GROUPS groups of rows to each of the stacked totals."""

    def add(total, *operands):
        sizes = jnp.full((GROUPS,), len(operands[0]) // GROUPS, jnp.int32)
        columns = (fp8.quantize_ragged(x, sizes) for x in operands)
        return fp8.scaled_ragged_wgrad(*columns, sizes, accumulate_into=total)

    return _stacked(add, totals, lhs, rhs)


def _stacked(add, *stacks):
    return jax.lax.scan(lambda _, of: (None, add(*of)), None, stacks)[1]


# name: (adds products to stacked totals, the shapes of totals, lhs and rhs)
SUMS = {
    "products": (sums_of_products, [(256, 384), (256, 512), (384, 512)]),
    "gradients": (sums_of_gradients, [(GROUPS, 256, 384), (512, 256), (512, 384)]),
}
