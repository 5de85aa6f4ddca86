"""Gradients of layers in a scan have the bits of layers one after another.

XLA lets the kernels write into the stacks of the scan: FP8 values that are kept for the backward
pass, and gradients of weights.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import reference
import stacks_of_a_scan as scan

from jax_fp8gemm import Recipe, matmul, quantize, quantize_weight

pytestmark = pytest.mark.gpu


def problem(name, d, f, dtype):
    shapes = [(scan.NUM_LAYERS, *shape) for shape in scan.weight_shapes(name, d, f)]
    keys = jax.random.split(jax.random.key(d + f), len(shapes) + 1)
    weights = [
        (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(dtype)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    return weights, jax.random.normal(keys[-1], (96, d), jnp.bfloat16).astype(dtype)


def assert_same_gradients(layer, weights, x):
    run = partial(jax.jit, static_argnames="is_unrolled")(partial(scan.gradients, layer))
    found, expected = run(weights, x), run(weights, x, is_unrolled=True)
    jax.tree.map(reference.assert_same_bits, found, expected)
    assert all(jnp.abs(leaf.astype(jnp.float32)).max() > 0 for leaf in jax.tree.leaves(found))


# Slices of a stack that begin at multiples of 16 bytes and of 128, and others.
@pytest.mark.parametrize("d, f", [(128, 256), (17, 8), (24, 40), (136, 72), (200, 1000)])
@pytest.mark.parametrize("remat", scan.REMAT)
@pytest.mark.parametrize("name", scan.LAYERS)
def test_gradients(name, remat, d, f):
    layer = scan.REMAT[remat](scan.LAYERS[name])
    assert_same_gradients(layer, *problem(name, d, f, jnp.bfloat16))


@pytest.mark.parametrize(
    "recipe",
    [Recipe(wgrad_lhs_block=(128, 128)), Recipe(bwd="e5m2", pow2_scale=True), Recipe(wgrad="bf16")],
    ids=["square", "e5m2", "bf16"],
)
@pytest.mark.parametrize("name", scan.LAYERS)
def test_gradients_of_recipes(name, recipe):
    layer = partial(scan.LAYERS[name], recipe=recipe)
    assert_same_gradients(layer, *problem(name, 136, 256, jnp.bfloat16))


@pytest.mark.parametrize("name", scan.LAYERS)
def test_gradients_in_f32(name):
    assert_same_gradients(scan.LAYERS[name], *problem(name, 136, 256, jnp.float32))


@pytest.mark.parametrize("name", scan.LAYERS)
def test_weights_that_are_quantised_outside_the_scan(name):
    weights, x = problem(name, 136, 256, jnp.bfloat16)

    def once(weights, x):
        return scan.gradients(scan.LAYERS[name], jax.tree.map(quantize_weight, weights), x)

    found, dx = jax.jit(once)(weights, x)
    expected, expected_dx = jax.jit(partial(scan.gradients, scan.LAYERS[name]))(weights, x)
    reference.assert_same_bits(dx, expected_dx)
    for gradient, of_plain in zip(found, expected, strict=True):
        reference.assert_same_bits(gradient.weight, of_plain)


@pytest.mark.parametrize("m", [1, 8, 64])
@pytest.mark.parametrize("n, k", [(256, 256), (4096, 4096)], ids=str)
def test_products_of_slices_of_a_stack(m, n, k):
    """Of a stack of quantised weights, in a scan inside of a loop over tokens."""
    up, down = (
        jax.random.normal(jax.random.key(i), (scan.NUM_LAYERS, *shape), jnp.bfloat16) / shape[0]
        for i, shape in enumerate([(k, n), (n, k)])
    )
    stack = [quantize(w, block=(128, 128), with_transpose="only") for w in (up, down)]
    x = jax.random.normal(jax.random.key(2), (m, k), jnp.bfloat16)
    layer = lambda x, w: x + matmul(matmul(x, w[0]), w[1])

    def in_loops(x, stack):
        layers = lambda _, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0]
        return jax.lax.fori_loop(0, 2, layers, x)

    expected = x
    for i in [*range(scan.NUM_LAYERS)] * 2:
        expected = layer(expected, [w[i] for w in stack])
    reference.assert_same_bits(jax.jit(in_loops)(x, stack), expected)


@pytest.mark.parametrize("name", scan.SUMS)
def test_sums_in_place_of_stacked_totals(name):
    add, shapes = scan.SUMS[name]
    keys = jax.random.split(jax.random.key(3), len(shapes))
    dtypes = jnp.float32, jnp.bfloat16, jnp.bfloat16
    totals, lhs, rhs = (
        jax.random.normal(key, (scan.NUM_LAYERS, *shape), dtype)
        for key, shape, dtype in zip(keys, shapes, dtypes, strict=True)
    )
    each = [add(totals[i : i + 1], lhs[i : i + 1], rhs[i : i + 1]) for i in range(scan.NUM_LAYERS)]
    reference.assert_same_bits(jax.jit(add)(totals, lhs, rhs), jnp.concatenate(each))
    assert not jnp.array_equal(each[0], totals[:1])
