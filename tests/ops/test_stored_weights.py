"""Weights quantised once, in either orientation or in both: the same bits, and what is transposed.

A forward product reads the transposed values of its weights, and the gradient of lhs the others.
"""

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from matmul_cases import random
from meshes import mesh

from jax_fp8gemm import BF16, matmul, quantize, ragged_dot, scaled_matmul
from jax_fp8gemm.moe import gated_mlp, moe_layer, moe_mlp

M, K, N, G = 40, 300, 136, 3
SIZES = jnp.asarray((15, 0, 20), jnp.int32)
STORED = {"values": False, "transposed": "only", "both": True}
stored = pytest.mark.parametrize("with_transpose", STORED.values(), ids=STORED)


def weights(*shape, with_transpose, seed=1):
    return quantize(
        random(*shape, seed=seed), block=(128, 128), pow2_scale=False, with_transpose=with_transpose
    )


def quantised(tree, with_transpose):
    return jax.tree.map(partial(quantize, block=(128, 128), with_transpose=with_transpose), tree)


# name: (function of lhs and of weights, the weights unquantised)
FUNCTIONS = {
    "matmul": (matmul, [random(K, N, seed=1)]),
    "vmap": (jax.vmap(matmul, in_axes=(None, 0)), [random(G, K, N, seed=1)]),
    "scan": (
        lambda x, w: jax.lax.scan(lambda x, w: (x, matmul(x, w)), x, w)[1],
        [random(G, K, N, seed=1)],
    ),
    "ragged_dot": (partial(ragged_dot, group_sizes=SIZES), [random(G, K, N, seed=1)]),
    "moe_mlp": (
        partial(moe_mlp, group_sizes=SIZES),
        [random(G, K, 2 * N, seed=1), random(G, N, K, seed=2)],
    ),
    "moe_layer": (
        lambda x, *w: moe_layer(x, jnp.tanh(x[:, :G]), *w, top_k=2),
        [random(G, K, 2 * N, seed=1), random(G, N, K, seed=2)],
    ),
}


def vjp(function, lhs, *weights):
    out, pullback = jax.vjp(lambda lhs: function(lhs, *weights), lhs)
    return out, *pullback(jnp.cos(out))


@functools.cache
def results(name, with_transpose):
    function, unquantised = FUNCTIONS[name]
    return jax.jit(partial(vjp, function))(random(M, K), *quantised(unquantised, with_transpose))


@pytest.mark.parametrize("with_transpose", [False, "only"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_stored_orientation_gives_the_bits_of_both(name, with_transpose):
    jax.tree.map(reference.assert_same_bits, results(name, with_transpose), results(name, True))


def test_weights_stored_transposed_give_the_bits_of_unquantised_weights():
    expected = jax.jit(partial(vjp, matmul))(random(M, K), random(K, N, seed=1))
    jax.tree.map(reference.assert_same_bits, results("matmul", "only"), expected)


def cuda_transposes(function, *args):
    """The shapes of FP8 matrices that the program for an NVIDIA GPU transposes."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @jax_fp8gemm_" in text
    return re.findall(r"stablehlo.transpose .*-> tensor<([\dx]+)xf8E4M3FN>", text)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_forward_pass_transposes_no_weight_that_is_stored_transposed(name):
    function, unquantised = FUNCTIONS[name]
    lhs = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    transposes = lambda how: cuda_transposes(function, lhs, *quantised(unquantised, how))
    assert transposes("only") == transposes(True) == []
    assert len(transposes(False)) == len(unquantised)


def test_a_gradient_reads_the_other_orientation():
    lhs = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    gradient = jax.grad(lambda lhs, w: matmul(lhs, w).astype(jnp.float32).sum())
    transposes = lambda how: cuda_transposes(gradient, lhs, weights(K, N, with_transpose=how))
    assert transposes(False) == transposes(True) == []
    assert transposes("only") == [f"{K}x{N}"]


def test_the_backward_pass_keeps_weights_as_they_are_stored():
    lhs, w = random(M, K), weights(K, N, with_transpose="only")
    _, pullback = jax.vjp(lambda lhs: matmul(lhs, w), lhs)
    kept = [x for x in jax.tree.leaves(pullback) if getattr(x, "dtype", None) == w.dtype]
    assert [x.shape for x in kept] == [(N, K)]


# Layers of rows (M, K), with these weights.
LAYERS = {
    "matmul": (matmul, [random(K, K, seed=1)]),
    "ragged_dot": (partial(ragged_dot, group_sizes=SIZES), [random(G, K, K, seed=1)]),
    "gated_mlp": (gated_mlp, [random(K, 2 * N, seed=1), random(N, K, seed=2)]),
    **{name: FUNCTIONS[name] for name in ("moe_mlp", "moe_layer")},
}


@stored
@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_a_scan_keep_no_copy_of_them(name, with_transpose):
    """A model whose weights are frozen in FP8 needs the memory of one such model."""
    layer, layer_weights = LAYERS[name]
    stacked = quantised([jnp.stack([w] * 2) for w in layer_weights], with_transpose)
    model = lambda x, w: jax.lax.scan(lambda x, w: (layer(x, *w), None), x, w)[0].sum()
    jaxpr = jax.make_jaxpr(jax.grad(model))(random(M, K), stacked).jaxpr
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    kept = {x.aval.dtype for x in forward.outvars}
    assert jnp.dtype(jnp.float32) in kept  # results, which tell that the scan is the right one
    assert jnp.dtype(jnp.float8_e4m3fn) not in kept


def test_weights_of_a_model_at_one_byte():
    """Of bf16 parameters, as of Flax; then a transposition of what is stored is free too."""
    params = {"up": random(256, 384), "down": random(384, 256, seed=1)}
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    small = jax.tree.map(partial(quantize, block=(128, 128), with_transpose="only"), params)
    sizes = [x.nbytes for x in jax.tree.leaves(small)]
    assert sum(sizes) == 2 * 256 * 384 + 2 * 4 * 2 * 3
    x = random(M, 256, dtype=jnp.bfloat16)
    model = lambda params: matmul(jax.nn.silu(matmul(x, params["up"])), params["down"])
    reference.assert_same_bits(jax.jit(model)(small), jax.jit(model)(params))


@stored
def test_other_readers(with_transpose):
    lhs, w = random(M, K), weights(K, N, with_transpose=with_transpose)
    expected = weights(K, N, with_transpose=False)
    reference.assert_same_bits(w.dequantize(), expected.dequantize())
    for how in (dict(recipe=BF16), dict(precision="highest")):
        np.testing.assert_array_equal(matmul(lhs, w, **how), matmul(lhs, expected, **how))
    product = partial(scaled_matmul, quantize(lhs))
    reference.assert_same_bits(product(w.T), product(expected.T))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
def test_weights_cut_by_explicit_axes(spec):
    on = mesh(AxisType.Explicit)
    w = weights(512, 1024, with_transpose="only")
    lhs = random(M, 512)
    out_sharding = P(None, spec[1] if len(spec) > 1 else None)
    run = jax.jit(lambda lhs, w: vjp(partial(matmul, out_sharding=out_sharding), lhs, w))
    expected = jax.jit(partial(vjp, matmul))(lhs, w)
    with jax.set_mesh(on):
        turned = P(*reversed((*spec, *(None,) * (2 - len(spec)))))
        w = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, turned), w)
        found = run(jax.sharding.reshard(lhs, P()), w)
    assert jax.typeof(found[0]).sharding.spec == out_sharding
    for x, y in zip(found, expected, strict=True):
        # Equal but for the order in which devices add their parts of k or of n.
        assert reference.calc_diff(x, y) < 1e-9


def test_experts_along_a_mesh_axis():
    unquantised = [random(8, 128, 256, seed=1), random(8, 128, 128, seed=2)]
    x, logits = random(64, 128), random(64, 8, seed=3)
    layer = partial(moe_layer, top_k=2, expert_axis="x", mesh=mesh(AxisType.Auto))
    run = jax.jit(lambda x, *w: vjp(lambda x, *w: layer(x, logits, *w), x, *w))
    expected = run(x, *quantised(unquantised, True))
    for how in (False, "only"):
        jax.tree.map(reference.assert_same_bits, run(x, *quantised(unquantised, how)), expected)
