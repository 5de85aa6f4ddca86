"""moe_mlp and moe_layer over Explicit mesh axes: the known results, sharded as the operands."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P
from meshes import mesh

from jax_fp8gemm import BF16, Recipe
from jax_fp8gemm.moe import moe_layer, moe_mlp

POW2 = Recipe(pow2_scale=True)
POW2_KEPT = Recipe(pow2_scale=True, kept_gate_up="fp8")
M, D, F, E, TOP_K = 16, 32, 8, 4, 2
SIZES = np.array([5, 0, 8, 3], np.int32)


@functools.cache
def operands():
    """x, router logits, w_gate_up, w_down and the cotangent of the result."""
    rng = np.random.default_rng(0)
    shapes = (M, D), (M, E), (E, D, 2 * F), (E, F, D), (M, D)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def mlp(recipe, x, logits, w_gate_up, w_down):
    return moe_mlp(x, w_gate_up, w_down, jnp.asarray(SIZES), recipe=recipe)


def layer(recipe, x, logits, w_gate_up, w_down):
    return moe_layer(x, logits, w_gate_up, w_down, top_k=TOP_K, recipe=recipe)


def expert_parallel(recipe, x, logits, w_gate_up, w_down):
    return moe_layer(x, logits, w_gate_up, w_down, top_k=TOP_K, recipe=recipe, expert_axis="x")


def gradients(f, x, logits, w_gate_up, w_down, dout):
    loss = lambda x, *weights: (f(x, logits, *weights) * dout).sum()
    return jax.grad(loss, (0, 1, 2))(x, w_gate_up, w_down)


def gradients_of_scan(f, x, logits, w_gate_up, w_down, dout):
    """Of weights that two steps read, each with another x."""

    def loss(x, *weights):
        step = lambda total, sign: (total + (f(sign * x, logits, *weights) * dout).sum(), None)
        return jax.lax.scan(step, jnp.zeros(()), jnp.float32([1, -1]))[0]

    return jax.grad(loss, (0, 1, 2))(x, w_gate_up, w_down)


@functools.cache
def without_types(f, run, recipe):
    """On one device; expert_parallel, whose cotangents are rounded otherwise, on an Auto mesh."""
    is_on_mesh = f is expert_parallel
    on_auto = jax.set_mesh(mesh(AxisType.Auto)) if is_on_mesh else contextlib.nullcontext()
    with on_auto:
        return jax.jit(functools.partial(run, functools.partial(f, recipe)))(*operands())


# name: (specs of x, logits and dout, of the weights)
CASES = {
    "replicated": (P(), P()),
    "rows": (P("x"), P()),
    "experts": (P(), P("x")),
    "experts and rows": (P("x"), P("x")),
    "reduced weights": (P("x"), P(reduced={"x"})),
}
# (what is computed, whether it is jitted as a whole, recipe)
RUNS = {
    "jit of grad": (gradients, True, POW2),
    "jit of grad, FP8 gate_up": (gradients, True, POW2_KEPT),
    "eager grad of jit": (gradients, False, POW2),
    "eager grad of jit, bf16": (gradients, False, BF16),
    "grad of scan": (gradients_of_scan, True, POW2),
    "eager grad of scan": (gradients_of_scan, False, POW2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("f", [mlp, layer, expert_parallel])
def test_gradients(f, name, case):
    run, is_jitted, recipe = RUNS[name]
    tokens, weights = CASES[case]
    # The result is sharded as x; but moe_layer gathers tokens, or cuts them along all axes.
    of_result = {mlp: tokens, layer: P(), expert_parallel: P("x")}[f]
    specs = tokens, tokens, weights, weights, of_result
    function = functools.partial(f, recipe)
    with jax.set_mesh(mesh(AxisType.Explicit, shape=(4,))):
        placed = [jax.device_put(x, spec) for x, spec in zip(operands(), specs, strict=True)]
        if is_jitted:
            found = jax.jit(functools.partial(run, function))(*placed)
        else:
            found = run(jax.jit(function), *placed)
        x, _, *weights, _ = placed
        for gradient, operand in zip(found, (x, *weights), strict=True):
            spec = jax.typeof(operand).sharding.spec
            assert jax.typeof(gradient).sharding.spec == P(*spec.partitions, unreduced=spec.reduced)
        found = [np.asarray(reshard(gradient, P())) for gradient in found]
    expected = without_types(f, run, recipe)
    for gradient, truth in zip(found, expected, strict=True):
        assert reference.calc_diff(gradient, truth) < REORDERED  # f32 sums in another order


def test_an_eager_gradient_of_a_scan_with_biases():
    x, _, *weights, dout = operands()
    biases = np.ones((E, 2 * F), np.float32), np.ones((E, D), np.float32)

    def loss(weights, biases):
        mlp = functools.partial(moe_mlp, group_sizes=jnp.asarray(SIZES), recipe=POW2)
        step = lambda total, x: (total + (mlp(x, *weights, biases=biases) * dout).sum(), None)
        return jax.lax.scan(step, jnp.zeros(()), jnp.stack([x, -x]))[0]

    expected = jax.jit(jax.grad(loss, (0, 1)))(weights, biases)
    with jax.set_mesh(mesh(AxisType.Explicit, shape=(4,))):
        found = jax.grad(loss, (0, 1))(*jax.device_put((weights, biases), P()))
    for gradient, truth in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert reference.calc_diff(gradient, truth) < REORDERED
