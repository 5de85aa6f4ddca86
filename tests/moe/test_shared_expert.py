"""The shared expert of moe_layer, against float64 and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, assert_diff_below
from errors import raises
from gated_activations import DEEPSEEK_V4, gated
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from test_expert_parallel import EXPLICIT, M, auto_mesh, problem
from test_moe import random

from jax_fp8gemm import BF16, DEEPSEEK_V3, quantize
from jax_fp8gemm.moe import gated_mlp, moe_layer

D, F = 128, 192  # another f than that of the routed experts


def shared_weights():
    return random(D, 2 * F, seed=11, scale=D**-0.5), random(F, D, seed=12, scale=F**-0.5)


def vjp(layer, x, indices, probs, w_gate_up, w_down, dout, *shared):
    """The result, and the gradients of x and of the shared expert."""
    function = lambda x, *shared: layer(x, (indices, probs), w_gate_up, w_down, shared)
    out, pullback = jax.vjp(function, x, *shared)
    return out, *pullback(dout)


def layer_with_shared(x, router, w_gate_up, w_down, shared, **kwargs):
    return moe_layer(x, router, w_gate_up, w_down, shared_expert=shared, **kwargs)


@functools.cache
def expected(activation="silu"):
    """What the shared expert adds to the layer without it, in float64."""
    x, *_, dout = (np.asarray(operand, np.float64) for operand in problem())
    w_gate_up, w_down = (np.asarray(w, np.float64) for w in shared_weights())
    gate, up = np.split(x @ w_gate_up, 2, axis=1)
    out = gated(gate, up, activation) @ w_down
    if activation != "silu":
        return (out,)
    sigma, dh = 1 / (1 + np.exp(-gate)), dout @ w_down.T
    da = np.concatenate([dh * up * sigma * (1 + gate * (1 - sigma)), dh * gate * sigma], axis=1)
    return out, da @ w_gate_up.T, x.T @ da, (gate * sigma * up).T @ dout


def assert_adds(recipe, activation="silu", **kwargs):
    """The layer less the one without the shared expert is the shared expert."""
    run = functools.partial(layer_with_shared, recipe=recipe, activation=activation, **kwargs)
    operands = *problem(), *shared_weights()
    found = jax.jit(functools.partial(vjp, run))(*operands)
    alone = functools.partial(moe_layer, recipe=recipe, activation=activation, **kwargs)
    x, indices, probs, w_gate_up, w_down, dout = problem()
    out, pullback = jax.vjp(lambda x: alone(x, (indices, probs), w_gate_up, w_down), x)
    added = found[0] - out, found[1] - pullback(dout)[0], *found[2:]
    truth = expected(activation)
    assert_diff_below(LAYER[recipe], added[: len(truth)], truth)


@pytest.mark.parametrize("recipe", LAYER, ids=["bf16", "fp8"])
def test_it_adds_an_mlp_of_every_token(recipe):
    assert_adds(recipe)


def test_it_has_the_activation_of_the_layer():
    assert_adds(DEEPSEEK_V3, DEEPSEEK_V4)


@pytest.mark.parametrize("recipe", LAYER, ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "shape, axis", [((4,), "x"), ((4, 2), "y")], ids=["4 devices", "8 devices, tokens along x too"]
)
def test_on_a_mesh(recipe, shape, axis):
    assert_adds(recipe, mesh=auto_mesh(*shape), expert_axis=axis)


def test_on_a_mesh_of_explicit_axes():
    where = mesh(EXPLICIT, EXPLICIT, shape=(2, 2))
    tokens, experts = P(("x", "y")), P("x")
    specs = tokens, tokens, tokens, experts, experts, tokens, P("y"), P()
    operands = [
        jax.device_put(np.asarray(operand), NamedSharding(where, spec))
        for operand, spec in zip((*problem(), *shared_weights()), specs, strict=True)
    ]
    layer = functools.partial(layer_with_shared, expert_axis="x")
    found = jax.jit(functools.partial(vjp, layer))(*operands)
    one = jax.jit(functools.partial(vjp, layer_with_shared))(*problem(), *shared_weights())
    assert_diff_below(LAYER[DEEPSEEK_V3], found, one)


def test_in_a_shard_map():
    layer = functools.partial(layer_with_shared, expert_axis="x")
    tokens = experts = P("x")
    sharded = jax.shard_map(
        functools.partial(vjp, layer),
        mesh=auto_mesh(4),
        in_specs=(tokens, tokens, tokens, experts, experts, tokens, P(), P()),
        out_specs=(tokens, tokens, P(), P()),
    )
    found = jax.jit(sharded)(*problem(), *shared_weights())
    one = jax.jit(functools.partial(vjp, layer_with_shared))(*problem(), *shared_weights())
    assert_diff_below(LAYER[DEEPSEEK_V3], found, one)


def test_weights_quantised_once():
    x, indices, probs, *weights, _ = problem()
    quantised = [quantize(w, block=(128, 128), with_transpose=True) for w in shared_weights()]
    run = lambda shared: moe_layer(x, (indices, probs), *weights, shared_expert=shared)
    assert reference.calc_diff(run(quantised), run(shared_weights())) < 1e-6
    message = r"moe_layer: a ScaledArray shared_expert\[0\] has no gradient"
    with raises(TypeError, message):
        jax.grad(lambda shared: run(shared).sum(), allow_int=True)(quantised)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda up, down: up, ValueError, r"shared_expert must be None or \(w_gate_up"),
        (lambda up, down: (up, down, down), ValueError, "shared_expert must be None or"),
        (lambda up, down: (up[None], down), ValueError, r"shared_expert\[0\] must be \(d, 2 f\)"),
        (
            lambda up, down: (up, down[1:]),
            ValueError,
            r"shared_expert\[0\] .* and shared_expert\[1\] .* must be for x .*; got f32",
        ),
        (lambda up, down: (up, 1.0), TypeError, r"shared_expert\[1\] must be an array; got float"),
    ],
)
def test_bad_weights_raise(change, error, message):
    x, indices, probs, *weights, _ = problem()
    with raises(error, f"moe_layer: {message}"):
        moe_layer(x, (indices, probs), *weights, shared_expert=change(*shared_weights()))


def test_bad_operands_of_a_gated_mlp_raise():
    x, (up, down) = random(4, D, seed=1), shared_weights()
    for operands, error, message in [
        ((x, up[:, 1:], down), ValueError, r"w_gate_up \(d, 2 f\) .* must be for x .*; got f32"),
        ((x[:, 1:], up, down), ValueError, r".* for x f32\[4,127\]"),
        ((x[0, 0], up, down), ValueError, r"x must be \(\.\.\., d\); got x f32"),
        ((x.astype(int), up, down), TypeError, "x must be bf16, f16 or f32; got"),
        ((x, up, down.tolist()), TypeError, "w_down must be an array; got list"),
    ]:
        with raises(error, f"gated_mlp: {message}"):
            gated_mlp(*operands)


def test_no_shared_expert_is_the_layer_as_it_was():
    x, indices, probs, *weights, _ = problem()
    call = functools.partial(moe_layer, x, (indices, probs), *weights, recipe=BF16)
    reference.assert_same_bits(call(shared_expert=None), call())
    assert call().shape == (M, D) and call().dtype == jnp.float32
