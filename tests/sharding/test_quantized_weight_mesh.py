"""Weights quantised once, on meshes of eight devices: the bits and the collectives of the weights
themselves.
"""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh

from jax_fp8gemm import (
    Recipe,
    dot_general,
    einsum,
    master_weights,
    matmul,
    quantize_weight,
    ragged_dot,
)
from jax_fp8gemm.moe import moe_layer, moe_mlp

M, K, N, E, D, F, TOP_K = 256, 256, 512, 8, 128, 128, 2
SIZES = jnp.full((E,), M // E, jnp.int32)
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
on_both = pytest.mark.parametrize("axis_type", AXIS_TYPES.values(), ids=AXIS_TYPES)


def random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def place(on, x, spec):
    return jax.device_put(np.asarray(x), NamedSharding(on, spec))


def quantised(weights, **how):
    return jax.tree.map(partial(quantize_weight, **how), weights)


def vjp(function, x, *weights):
    out, pullback = jax.vjp(function, x, *weights)
    return out, *master_weights(pullback(jnp.cos(out)))


def assert_same_program(run, x, weights, **how):
    """Bits and shardings are those of the weights, and nothing else is moved than for them."""
    plain = jax.jit(run).lower(x, *weights).compile()
    pairs = jax.jit(partial(quantised, **how))(weights)
    once = jax.jit(run).lower(x, *pairs).compile()
    found, expected = once(x, *pairs), plain(x, *weights)
    jax.tree.map(reference.assert_same_bits, found, expected)
    for one, other in zip(found, expected, strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    assert not Counter(collectives(once)) - Counter(collectives(plain))


# name: (function, shape and spec of lhs, those of rhs, contracting)
PRODUCTS = {
    "data": (matmul, (M, K), P("x"), (K, N), P(), None),
    "FSDP": (matmul, (M, K), P("x"), (K, N), P("y"), None),
    "tensor, columns": (matmul, (M, K), P("x"), (K, N), P(None, "y"), None),
    "projection": (
        partial(einsum, "md,dnh->mnh"),
        (M, K),
        P("x"),
        (K, 4, 128),
        P(None, "y"),
        0,
    ),
    "transposed": (
        lambda x, w: dot_general(x, w, (((1,), (1,)), ((), ()))),
        (M, N),
        P("x"),
        (K, N),
        P("y"),
        None,
    ),
    "groups": (
        partial(ragged_dot, group_sizes=SIZES),
        (M, K),
        P("x"),
        (E, K, N),
        P(None, "y"),
        None,
    ),
}


@on_both
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, axis_type):
    function, lhs_shape, lhs_spec, rhs_shape, rhs_spec, contracting = PRODUCTS[name]
    on = mesh(axis_type, axis_type, shape=(4, 2))
    x = place(on, random(*lhs_shape, dtype=jnp.bfloat16), lhs_spec)
    w = place(on, random(*rhs_shape, seed=1), rhs_spec)
    with jax.set_mesh(on):
        assert_same_program(partial(vjp, function), x, [w], contracting=contracting)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
def test_shard_map(is_inside, check_vma):
    """The gradient of a replicated weight is the sum over the devices, whose tokens differ."""
    on = mesh(AxisType.Auto, AxisType.Auto, shape=(4, 2))
    x, w = random(M, K, dtype=jnp.bfloat16), random(K, N, seed=1)

    def run(w, prepare):
        def local(x, w):
            out, dx, dw = vjp(matmul, x, prepare(w))
            return out, dx, dw if check_vma else jax.lax.psum(dw, ("x", "y"))

        rows = P(("x", "y"))
        specs = dict(in_specs=(rows, P()), out_specs=(rows, rows, P()), check_vma=check_vma)
        return jax.jit(jax.shard_map(local, mesh=on, **specs))(x, w)

    expected = run(w, lambda w: w)
    found = run(w, quantize_weight) if is_inside else run(quantize_weight(w), lambda w: w)
    jax.tree.map(reference.assert_same_bits, found, expected)


def test_an_unreduced_result_is_refused():
    on = mesh(AxisType.Explicit)
    x, w = place(on, random(M, K), P(None, "x")), place(on, random(K, N), P("x"))
    pair = quantize_weight(w)
    for run in (matmul, partial(einsum, "mk,kn->mn"), partial(einsum, "mk,kn->nm")):
        with jax.set_mesh(on), pytest.raises(NotImplementedError, match="Pass its weight"):
            run(x, pair, out_sharding=P(unreduced={"x"}))


def test_an_out_sharding_of_too_many_dimensions_is_refused():
    on = mesh(AxisType.Explicit)
    x, w = place(on, random(M, K), P(None, "x")), place(on, random(K, N), P("x"))
    message = "einsum: out_sharding must have at most one entry for each dimension of the result"
    with jax.set_mesh(on), pytest.raises(ValueError, match=message):
        einsum("mk,kn->nm", x, quantize_weight(w), out_sharding=P("x", None, None))


EXPERTS = [random(E, D, 2 * F, seed=1) / 16, random(E, F, D, seed=2) / 16]
LOGITS = random(M, E, seed=3)


@on_both
@pytest.mark.parametrize("recipe", ["deepseek_v3", Recipe(wgrad="bf16")], ids=str)
def test_experts_along_an_axis(axis_type, recipe):
    on = mesh(axis_type, axis_type, shape=(4, 2))
    tokens = P(("x", "y"))
    x, logits = place(on, random(M, D, dtype=jnp.bfloat16), tokens), place(on, LOGITS, tokens)
    specs = P("x", "y") if recipe == "deepseek_v3" else P("x"), P("x")
    weights = [place(on, w, spec) for w, spec in zip(EXPERTS, specs, strict=True)]
    layer = partial(moe_layer, top_k=TOP_K, expert_axis="x", mesh=on, recipe=recipe)
    run = lambda x, *w: vjp(lambda x, *w: layer(x, logits, *w), x, *w)
    assert_same_program(run, x, weights, recipe=recipe)


@pytest.mark.parametrize("check_vma", [True, False])
def test_experts_in_a_shard_map(check_vma):
    """Each device quantises its own experts, or gets them quantised."""
    on = mesh(AxisType.Auto, shape=(8,))
    x = random(M, D, dtype=jnp.bfloat16)

    def run(prepare, *weights):
        def local(x, logits, *weights):
            layer = lambda x, *w: moe_layer(x, logits, *w, top_k=TOP_K, expert_axis="x")
            return vjp(layer, x, *map(prepare, weights))

        return jax.jit(
            jax.shard_map(local, mesh=on, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
        )(x, LOGITS, *weights)

    whole = lambda w: w
    expected = run(whole, *EXPERTS)
    jax.tree.map(reference.assert_same_bits, run(quantize_weight, *EXPERTS), expected)
    jax.tree.map(reference.assert_same_bits, run(whole, *quantised(EXPERTS)), expected)


# name: (function of x and weights, the weights)
ON_ONE_DEVICE = {
    "moe_mlp": (partial(moe_mlp, group_sizes=SIZES), EXPERTS),
    "moe_layer": (lambda x, *w: moe_layer(x, LOGITS, *w, top_k=TOP_K), EXPERTS),
    "moe_layer, shared expert": (
        lambda x, *w: moe_layer(x, LOGITS, *w[:2], top_k=TOP_K, shared_expert=w[2:]),
        [*EXPERTS, EXPERTS[0][0], EXPERTS[1][0]],
    ),
}


@on_both
@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_layers_whose_experts_all_devices_have(name, axis_type):
    function, weights = ON_ONE_DEVICE[name]
    on = mesh(axis_type, shape=(8,))
    x = place(on, random(M, D, dtype=jnp.bfloat16), P("x"))
    weights = [place(on, w, P()) for w in weights]
    with jax.set_mesh(on):
        assert_same_program(partial(vjp, function), x, weights)
