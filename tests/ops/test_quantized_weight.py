"""A weight that is quantised once: the bits of the weight itself, and one quantisation for many
calls.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import without_annotation_checks
from jax import lax

import jax_fp8gemm
from jax_fp8gemm import (
    BF16,
    HYBRID,
    QuantizedWeight,
    Recipe,
    dot_general,
    einsum,
    master_weights,
    matmul,
    quantize,
    quantize_weight,
    ragged_dot,
    ragged_dot_general,
)
from jax_fp8gemm._inspect import site, walk

M, K, N, G = 40, 300, 136, 3
SIZES = jnp.asarray((15, 0, 20), jnp.int32)
POW2_BF16_WGRAD = Recipe(bwd="e5m2", pow2_scale=True, wgrad="bf16")
TURNED_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def product_dims(contract, batch=((), ())):
    return lambda lhs, rhs, **how: dot_general(lhs, rhs, (contract, batch), **how)


# name: (function of lhs, rhs and of recipe=; shape of lhs; shape of rhs; contracting)
PRODUCTS = {
    "matmul": (matmul, (M, K), (K, N), None),
    "matmul of a vector": (matmul, (K,), (K, N), None),
    "matmul of a batch and a matrix": (matmul, (2, M, K), (K, N), None),
    "matmul of a batch": (matmul, (G, M, K), (G, K, N), None),
    "matmul of a matrix and a batch": (matmul, (M, K), (G, K, N), None),
    "dot_general": (product_dims(((1,), (0,))), (M, K), (K, N), None),
    "transposed": (product_dims(((1,), (1,))), (M, N), (K, N), None),
    "projection": (product_dims(((1,), (0,))), (M, K), (K, 4, 34), 0),
    "its counterpart": (product_dims(((1, 2), (0, 1))), (M, 4, 34), (4, 34, K), (0, 1)),
    "projection, transposed": (product_dims(((1, 2), (1, 2))), (M, 4, 34), (K, 4, 34), 0),
    "batch": (product_dims(((2,), (1,)), ((0,), (0,))), (G, M, K), (G, K, N), None),
    "einsum": (partial(einsum, "bsd,dnh->bsnh"), (2, M, K), (K, 4, 34), 0),
    "einsum of two": (partial(einsum, "bsnh,nhd->bsd"), (2, M, 4, 34), (4, 34, K), (1, 0)),
    "einsum with an ellipsis": (partial(einsum, "...d,df->...f"), (2, M, K), (K, N), None),
    "einsum of a batch": (partial(einsum, "gmd,gdf->gmf"), (G, M, K), (G, K, N), None),
    "einsum, embedding": (partial(einsum, "bsd,vd"), (2, M, N), (K, N), None),
    "ragged_dot": (partial(ragged_dot, group_sizes=SIZES), (M, K), (G, K, N), None),
    "ragged_dot_general": (
        lambda lhs, rhs, **how: ragged_dot_general(lhs, rhs, SIZES, TURNED_GROUPS, **how),
        (M, N),
        (G, K, N),
        None,
    ),
    "vmap": (
        lambda lhs, rhs, **how: jax.vmap(partial(matmul, **how), (None, 0))(lhs, rhs),
        (M, K),
        (G, K, N),
        None,
    ),
    "remat": (
        lambda lhs, rhs, **how: jax.checkpoint(partial(matmul, **how))(lhs, rhs),
        (M, K),
        (K, N),
        None,
    ),
    "remat that saves names": (
        lambda lhs, rhs, **how: jax.checkpoint(
            partial(matmul, **how),
            policy=jax.checkpoint_policies.save_only_these_names("fp8gemm_rhs"),
        )(lhs, rhs),
        (M, K),
        (K, N),
        None,
    ),
}


def vjp(function, lhs, rhs):
    out, pullback = jax.vjp(function, lhs, rhs)
    return out, *master_weights(pullback(jnp.cos(out)))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, "deepseek_v3") for name in PRODUCTS),
        *((name, POW2_BF16_WGRAD) for name in ("matmul", "transposed", "ragged_dot")),
        *((name, BF16) for name in ("matmul", "projection", "einsum of two", "ragged_dot_general")),
    ],
    ids=str,
)
def test_bits_are_those_of_the_weight(name, recipe):
    function, lhs_shape, rhs_shape, contracting = PRODUCTS[name]
    lhs, rhs = random(*lhs_shape, dtype=jnp.bfloat16), random(*rhs_shape, seed=1)
    run = jax.jit(partial(vjp, partial(function, recipe=recipe)))
    expected = run(lhs, rhs)
    found = run(lhs, quantize_weight(rhs, contracting=contracting, recipe=recipe))
    jax.tree.map(reference.assert_same_bits, found, expected)
    assert found[2].dtype == jnp.float32  # that of the master weight


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=str)
def test_gradients_have_the_dtype_of_the_master_weight(dtype):
    lhs, rhs = random(M, K, dtype=jnp.bfloat16), random(K, N, seed=1, dtype=dtype)
    expected = jax.jit(partial(vjp, matmul))(lhs, rhs)
    found = jax.jit(partial(vjp, matmul))(lhs, quantize_weight(rhs))
    jax.tree.map(reference.assert_same_bits, found, expected)
    assert found[2].dtype == dtype


@pytest.mark.parametrize("recipe", ["deepseek_v3", Recipe(bwd="e5m2", pow2_scale=True), BF16])
@pytest.mark.parametrize("as_array", [jnp.asarray, np.asarray], ids=["JAX", "NumPy"])
def test_the_operator_multiplies_by_the_recipe_of_the_weight(as_array, recipe):
    lhs, w = as_array(random(M, K)), random(K, N, seed=1)
    weight, product = quantize_weight(w, recipe=recipe), lambda lhs, w: lhs @ w
    named = partial(matmul, recipe=recipe)
    reference.assert_same_bits(product(lhs, weight), named(lhs, w))
    reference.assert_same_bits(jax.jit(product)(lhs, weight), jax.jit(named)(lhs, w))
    jax.tree.map(reference.assert_same_bits, vjp(product, lhs, weight), vjp(named, lhs, w))


def test_the_operator_takes_no_weight_on_the_left():
    with pytest.raises(TypeError, match="unsupported operand"):
        quantize_weight(random(K, N)) @ random(N, K)


def test_a_plain_product_reads_the_weight():
    lhs, rhs = random(M, K), random(K, N, seed=1)
    run = jax.jit(partial(vjp, partial(matmul, precision="highest")))
    jax.tree.map(reference.assert_same_bits, run(lhs, quantize_weight(rhs)), run(lhs, rhs))


def test_the_stored_quantisation():
    w = random(4, 34, K)
    found = quantize_weight(w, contracting=(0, 1), recipe=Recipe(fwd="e5m2", pow2_scale=True))
    how = dict(block=(128, 128), dtype=jnp.float8_e5m2, pow2_scale=True, with_transpose=True)
    expected = quantize(w.reshape(4 * 34, K), **how)
    jax.tree.map(reference.assert_same_bits, found.scaled, expected)
    assert (found.shape, found.dtype, found.ndim) == (w.shape, w.dtype, 3)
    assert found.contracting == (-3, -2)
    assert quantize_weight(w, recipe="bf16").scaled is None


def test_the_gradient_is_a_pytree_of_the_same_structure():
    """Its quantised part is zero, so that an optimiser that sees it changes nothing there."""
    lhs, w = random(M, K), quantize_weight(random(K, N, seed=1))
    grads = jax.jit(jax.grad(lambda w: matmul(lhs, w).sum()))(w)
    assert jax.tree.structure(grads) == jax.tree.structure(w)
    quantised = [np.asarray(leaf).astype(np.float32) for leaf in jax.tree.leaves(grads.scaled)]
    assert len(quantised) == 3 and not any(leaf.any() for leaf in quantised)
    assert np.asarray(grads.weight).any()


def quantisations(jaxpr):
    """How often a jaxpr quantises in squares, as weights are."""
    calls = (call.eqn for call in walk.calls_of(jaxpr) if site.is_quantisation(call.eqn))
    return sum("block" in eqn.params["mode"] for eqn in calls)


def in_loops(jaxpr):
    """The same, inside the bodies of its scans."""
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    inner = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    own = [quantisations(eqn.params["jaxpr"].jaxpr) for eqn in scans]
    return sum(own) + sum(map(in_loops, inner))


def loss(params, batch):
    h = jax.nn.silu(matmul(batch, params["up"]))
    return (matmul(h, params["down"]).astype(jnp.float32) ** 2).mean()


def accumulated(params, batches, *, is_quantised_once):
    """The f32 gradients of all micro-batches, added in a scan, as a training step computes them."""
    weights = jax.tree.map(quantize_weight, params) if is_quantised_once else params

    def add(total, batch):
        grads = master_weights(jax.grad(loss)(weights, batch))
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), None

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
    return lax.scan(add, zeros, batches)[0]


def differentiated(params, batches, *, is_quantised_once):
    """The gradient of the loss of all micro-batches: master weights go in, their gradients out."""

    def total(params):
        weights = jax.tree.map(quantize_weight, params) if is_quantised_once else params
        step = jax.checkpoint(lambda total, batch: (total + loss(weights, batch), None))
        return lax.scan(step, jnp.float32(0), batches)[0]

    return jax.grad(total)(params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("train", [accumulated, differentiated])
def test_microbatches_quantise_weights_once(train, dtype):
    params = {"up": random(K, N, dtype=dtype), "down": random(N, K, seed=1, dtype=dtype)}
    batches = random(4, M, K, seed=2, dtype=jnp.bfloat16)
    each, once = (partial(train, is_quantised_once=is_once) for is_once in (False, True))
    assert in_loops(jax.make_jaxpr(each)(params, batches).jaxpr) > 0
    jaxpr = jax.make_jaxpr(once)(params, batches).jaxpr
    assert (in_loops(jaxpr), quantisations(jaxpr)) == (0, 2)
    found, expected = jax.jit(once)(params, batches), jax.jit(each)(params, batches)
    jax.tree.map(reference.assert_same_bits, found, expected)


def test_no_quantised_part_of_a_gradient_is_computed():
    """Of a scan whose pairs are differentiated themselves: XLA drops the zeros in FP8."""
    w, batches = quantize_weight(random(K, N)), random(4, M, K, seed=2)
    total = lambda w: lax.scan(lambda t, x: (t + matmul(x, w).sum(), None), 0.0, batches)[0]
    text = jax.jit(lambda w: jax.grad(total)(w).weight).lower(w).compile().as_text()
    carried = [
        types for types in re.findall(r" = \((.*?)\) while\(", text) if f"[{K},{N}]" in types
    ]
    # The gradient, f32, and no FP8, which a CPU adds as f16.
    assert len(carried) == 1 and not re.findall(rf"f(?:8e4m3fn|16)\[{K},{N}\]", carried[0])


def test_layers_in_a_scan():
    """A stack of weights is mapped over, as of a model whose layers are scanned."""
    weights, x = random(G, N, N), random(M, N, seed=1)
    model = lambda w: lax.scan(lambda x, w: (jnp.tanh(matmul(x, w)), None), x, w)[0].sum()
    found = jax.jit(jax.grad(model))(quantize_weight(weights))
    reference.assert_same_bits(found.weight, jax.jit(jax.grad(model))(weights))


@pytest.mark.parametrize("names", [None, ("fp8gemm_rhs",)], ids=["no remat", "remat"])
def test_layers_in_a_scan_keep_no_copy_of_their_weights(names):
    policy = names and jax.checkpoint_policies.save_only_these_names(*names)
    product = jax.checkpoint(matmul, policy=policy) if names else matmul
    model = lambda w, x: lax.scan(lambda x, w: (jnp.tanh(product(x, w)), None), x, w)[0].sum()

    def num_copies(w):
        jaxpr = jax.make_jaxpr(jax.grad(model))(w, random(M, w.shape[1])).jaxpr
        forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        return sum(x.aval.shape == w.shape for x in forward.outvars)

    w = random(G, 256, 256, seed=1)  # whole blocks, so that the copies have its shape
    assert (num_copies(w), num_copies(quantize_weight(w))) == (1, 0)


def test_astype_keeps_the_quantisation():
    lhs, w = random(M, K, dtype=jnp.bfloat16), quantize_weight(random(K, N, seed=1))
    out, _, dw = vjp(lambda lhs, w: matmul(lhs, w.astype(jnp.bfloat16)), lhs, w)
    assert (out.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    expected = matmul(lhs, w.scaled)
    reference.assert_same_bits(out, expected)


def test_numpy_and_export():
    lhs, w = random(M, K), quantize_weight(np.asarray(random(K, N, seed=1)))
    exported = jax.export.export(jax.jit(matmul))(lhs, w)
    loaded = jax.export.deserialize(exported.serialize())
    reference.assert_same_bits(loaded.call(lhs, w), jax.jit(matmul)(lhs, w))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, w: matmul(x, quantize_weight(w, recipe="bf16")),
            r"matmul: a QuantizedWeight must be quantised as the recipe says, Recipe\(\); got one "
            r"that holds nothing, by Recipe\(fwd=None\). Quantise with quantize_weight",
        ),
        (
            lambda x, w: matmul(x, quantize_weight(w), recipe=Recipe(pow2_scale=True)),
            r"as the recipe says, Recipe\(pow2_scale=True\); got one that holds f8e4m3fn\[300,136\]"
            r", by Recipe\(\)",
        ),
        (
            lambda x, w: matmul(x, quantize_weight(w), recipe=Recipe(fwd="e5m2")),
            r"as the recipe says, Recipe\(fwd='e5m2'\); got one that holds f8e4m3fn",
        ),
        (
            lambda x, w: matmul(x, QuantizedWeight(w, quantize_weight(w[:128]).scaled)),
            r"matmul: rhs.scaled must be the quantisation of rhs.weight with block \(128, 128\), "
            r"\[300, 136\]; got rhs.weight f32\[300,136\], rhs.scaled f8e4m3fn\[128,136\] with "
            r"block \(128, 128\). Quantise again",
        ),
        (
            lambda x, w: matmul(x, QuantizedWeight(w, quantize(w))),
            r"got .* rhs.scaled f8e4m3fn\[300,136\] with block \(1, 128\)",
        ),
        (
            lambda x, w: matmul(x, quantize_weight(w, contracting=1)),
            r"matmul: rhs must be quantised as the matrices that the product reads; got "
            r"f32\[300,136\] with contracting=\(-1,\). Quantise with quantize_weight\(rhs\)",
        ),
        (
            lambda x, w: dot_general(x, quantize_weight(w[None]), (((1,), (1,)), ((), ()))),
            r"dot_general: rhs must be quantised as .* got f32\[1,300,136\] with "
            r"contracting=\(-2,\). Quantise with quantize_weight\(rhs, contracting=1\)",
        ),
        (
            lambda x, w: einsum("mk,kn->m", x, quantize_weight(w)),
            r"einsum: with a QuantizedWeight, each letter must name one dimension .* got "
            r"'mk,kn->m'",
        ),
        (
            lambda x, w: ragged_dot(x, quantize_weight(w), jnp.ones(1, jnp.int32)),
            r"ragged_dot: rhs must be .*\(g, k, n\); got rhs f32\[300,136\]",
        ),
        (
            lambda x, w: matmul(x, quantize_weight(w, contracting=(0, 1))),
            r"quantize_weight: contracting must leave a dimension of w",
        ),
        (
            lambda x, w: quantize_weight(w, contracting=2),
            r"quantize_weight: contracting must name dimensions of w, each once; got 2, w f32",
        ),
        (lambda x, w: quantize_weight(w)[0], r"QuantizedWeight: index must be an ellipsis; got 0"),
        (
            lambda x, w: list(quantize_weight(w)),
            r"QuantizedWeight: it cannot be iterated over; got",
        ),
    ],
)
def test_sentences(call, message):
    x, w = random(M, K), random(K, N)
    with pytest.raises((ValueError, TypeError, NotImplementedError, IndexError), match=message):
        jax.eval_shape(call, x, w)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: matmul(w, w), r"matmul: lhs must be an array; got QuantizedWeight"),
        (
            lambda w: matmul(random(M, K), QuantizedWeight(None, None)),
            r"matmul: rhs.weight must be an array; got NoneType",
        ),
        (lambda w: quantize_weight(w), r"quantize_weight: w must be an array; got Quantized"),
        (
            lambda w: quantize_weight(jnp.ones((2, 2), jnp.int32)),
            r"quantize_weight: w must be bf16, f16 or f32; got w s32\[2,2\]",
        ),
    ],
)
def test_sentences_of_types(call, message):
    with pytest.raises(TypeError, match=message):
        call(quantize_weight(random(K, K)))


def test_sentences_of_static_parts():
    w, static = quantize_weight(random(K, N)), (("hybrid", (-2,)), (BF16, -2), (BF16, (0,)))
    for recipe, contracting in static:
        with without_annotation_checks():
            wrong = QuantizedWeight(w.weight, w.scaled, recipe, contracting)
        message = "matmul: rhs.recipe must be a Recipe, and rhs.contracting a tuple of dimensions"
        with pytest.raises(TypeError, match=message):
            matmul(random(M, K), wrong)


def test_another_backward_format_needs_no_other_quantisation():
    lhs, w = random(M, K), random(K, N, seed=1)
    run = jax.jit(partial(vjp, partial(matmul, recipe=HYBRID)))
    jax.tree.map(reference.assert_same_bits, run(lhs, quantize_weight(w)), run(lhs, w))


def test_public_names():
    for name in ("QuantizedWeight", "quantize_weight", "master_weights"):
        assert hasattr(jax_fp8gemm, name)
