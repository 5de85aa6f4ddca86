"""Biases of experts, in moe_mlp and moe_layer, against float64 and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, assert_diff_below
from errors import raises
from gated_activations import GPT_OSS, gated, gated_grad
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from moe_cases import SIZES, TOTAL, D, F, G, problem, random
from test_expert_parallel import EXPLICIT, E, M, auto_mesh
from test_expert_parallel import D as LAYER_D
from test_expert_parallel import F as LAYER_F
from test_expert_parallel import problem as layer_problem

from jax_fp8gemm import BF16, DEEPSEEK_V3, Recipe
from jax_fp8gemm.moe import moe_layer, moe_mlp

RECIPES = pytest.mark.parametrize("recipe", LAYER, ids=["bf16", "fp8"])


def biases_of(g=G, f=F, d=D):
    return random(g, 2 * f, seed=21), random(g, d, seed=22)


@functools.partial(jax.jit, static_argnames=("recipe", "activation"))
def run(x, w_gate_up, w_down, dout, b_gate_up, b_down, sizes, recipe, activation="silu"):
    """The result, and the gradients of x, the weights and the biases."""
    mlp = lambda x, w_gate_up, w_down, *biases: moe_mlp(
        x, w_gate_up, w_down, sizes, biases=biases, recipe=recipe, activation=activation
    )
    out, pullback = jax.vjp(mlp, x, w_gate_up, w_down, b_gate_up, b_down)
    return out, *pullback(dout)


def expert_vjp(x, w_gate_up, w_down, b_gate_up, b_down, dout, activation):
    """One expert in float64: the result, and the gradients as `run` returns them."""
    gate, up = np.split(x @ w_gate_up + b_gate_up, 2, axis=1)
    h = gated(gate, up, activation)
    da = np.concatenate(gated_grad(gate, up, dout @ w_down.T, activation)[:2], axis=1)
    out, grads = h @ w_down + b_down, (da @ w_gate_up.T, x.T @ da, h.T @ dout)
    return out, *grads, da.sum(axis=0), dout.sum(axis=0)


def truth(operands, sizes, activation="silu"):
    x, w_gate_up, w_down, dout, *biases = (np.asarray(y, np.float64) for y in operands)
    results = [np.zeros_like(y) for y in (x, x, w_gate_up, w_down, *biases)]
    for i, (start, end) in enumerate(reference.row_ranges(sizes, x.shape[0])):
        rows = slice(start, end)
        parts = x[rows], w_gate_up[i], w_down[i], biases[0][i], biases[1][i], dout[rows]
        one = expert_vjp(*parts, activation)
        results[0][rows], results[1][rows] = one[:2]
        for result, part in zip(results[2:], one[2:], strict=True):
            result[i] = part
    return results


@RECIPES
@pytest.mark.parametrize("activation", ("silu", GPT_OSS), ids=("silu", "gpt_oss"))
def test_value_and_gradients_against_float64(recipe, activation):
    operands = *problem(), *biases_of()
    found = run(*operands, jnp.asarray(SIZES), recipe, activation)
    assert_diff_below(LAYER[recipe], found, truth(operands, SIZES, activation))
    for rows in found[:2]:
        assert not rows[TOTAL:].any()
    for gradient in found[2:]:
        assert not gradient[np.array(SIZES) == 0].any()


@pytest.mark.parametrize("sizes", [(200, 0, 0, 0, 0), (0, 129, 1, 0, 70), (-3, 2**31 - 1, 0, 0, 9)])
def test_any_group_sizes(sizes):
    operands = *problem(), *biases_of()
    found = run(*operands, jnp.asarray(sizes), DEEPSEEK_V3)
    assert_diff_below(LAYER[DEEPSEEK_V3], found, truth(operands, sizes))
    # The gradient of b_down is a sum of what is not quantised.
    np.testing.assert_allclose(found[5], truth(operands, sizes)[5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("m, d, f", [(0, 128, 128), (3, 0, 128), (3, 128, 0)])
@RECIPES
def test_sizes_of_zero(recipe, m, d, f):
    x, dout = jnp.ones((m, d)), jnp.ones((m, d))
    weights = jnp.ones((2, d, 2 * f)), jnp.ones((2, f, d))
    operands = x, *weights, dout, *biases_of(2, f, d)
    out, dx, *gradients, db_down = run(*operands, jnp.asarray((m, 0)), recipe)
    assert out.shape == dx.shape == x.shape
    for gradient, w in zip(gradients, (*weights, operands[4]), strict=True):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(w))
    np.testing.assert_array_equal(db_down, np.outer([m, 0], np.ones(d)))


@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, BF16, Recipe(wgrad="bf16")], ids=str)
def test_biases_of_zero_change_no_bit(recipe):
    zeros = [jnp.zeros_like(b) for b in biases_of()]
    x, w_gate_up, w_down, _ = problem()
    call = functools.partial(moe_mlp, x, w_gate_up, w_down, jnp.asarray(SIZES), recipe=recipe)
    np.testing.assert_array_equal(call(biases=zeros), call())


def test_a_nan_stays_in_its_expert():
    x, w_gate_up, w_down, dout = problem()
    operands = x, w_gate_up, w_down, dout.at[75, 3].set(jnp.nan)
    *_, db_gate_up, db_down = run(*operands, *biases_of(), jnp.asarray(SIZES), DEEPSEEK_V3)
    for gradient in (db_gate_up, db_down):
        np.testing.assert_array_equal(np.isnan(gradient).any(axis=1), np.arange(G) == 3)


def layer_biases():
    return biases_of(E, LAYER_F, LAYER_D)


def layer_vjp(layer, x, indices, probs, w_gate_up, w_down, dout, *biases):
    """The result, and the gradients of x, the weights of choices, of experts, and the biases."""
    function = lambda x, probs, w_gate_up, w_down, *biases: layer(
        x, (indices, probs), w_gate_up, w_down, biases=biases
    )
    out, pullback = jax.vjp(function, x, probs, w_gate_up, w_down, *biases)
    return out, *pullback(dout)


@functools.cache
def layer_truth():
    operands = (np.asarray(y) for y in (*layer_problem(), *layer_biases()))
    x, indices, probs, w_gate_up, w_down, dout, b_gate_up, b_down = operands
    zeros = lambda y: np.zeros(y.shape)
    out, dx, dprobs = zeros(x), zeros(x), zeros(probs)
    dws = [zeros(y) for y in (w_gate_up, w_down, b_gate_up, b_down)]
    for i in range(E):
        for tokens, j in ((np.flatnonzero(indices[:, j] == i), j) for j in range(2)):
            weight = probs[tokens, j].astype(np.float64)[:, None]
            one = (y.astype(np.float64) for y in (x[tokens], w_gate_up[i], w_down[i]))
            biases = b_gate_up[i].astype(np.float64), b_down[i].astype(np.float64)
            y, dy, *grads = expert_vjp(*one, *biases, weight * dout[tokens], "silu")
            out[tokens] += weight * y
            dprobs[tokens, j] = (y * dout[tokens]).sum(axis=1)
            dx[tokens] += dy
            for total, part in zip(dws, grads, strict=True):
                total[i] += part
    return out, dx, dprobs, *dws


@RECIPES
@pytest.mark.parametrize(
    "shape, axis, parts",
    [(None, None, 1), ((4,), "x", 1), ((4, 2), "y", 2)],
    ids=["one device", "4 devices", "8 devices, tokens along x too, in parts"],
)
def test_layer_against_float64(recipe, shape, axis, parts):
    where = {} if shape is None else dict(mesh=auto_mesh(*shape), expert_axis=axis, parts=parts)
    layer = functools.partial(moe_layer, recipe=recipe, **where)
    found = jax.jit(functools.partial(layer_vjp, layer))(*layer_problem(), *layer_biases())
    assert_diff_below(LAYER[recipe], found, layer_truth())


def test_on_a_mesh_of_explicit_axes():
    where = mesh(EXPLICIT, EXPLICIT, shape=(2, 2))
    tokens, experts = P(("x", "y")), P("x")
    specs = *(tokens,) * 3, experts, experts, tokens, P(), P("x", "y")
    operands = [
        jax.device_put(np.asarray(operand), NamedSharding(where, spec))
        for operand, spec in zip((*layer_problem(), *layer_biases()), specs, strict=True)
    ]
    layer = functools.partial(moe_layer, expert_axis="x")
    found = jax.jit(functools.partial(layer_vjp, layer))(*operands)
    assert_diff_below(LAYER[DEEPSEEK_V3], found, layer_truth())
    assert [jax.typeof(g).sharding.spec for g in found[5:]] == [P(None, None), P("x", "y")]


@RECIPES
def test_mlp_on_a_mesh_of_explicit_axes(recipe):
    where = mesh(EXPLICIT, EXPLICIT, shape=(2, 2))
    operands = *problem(), *biases_of()
    specs = P("x"), P(), P(), P("x"), P(None, "y"), P()
    placed = [
        jax.device_put(np.asarray(operand), NamedSharding(where, spec))
        for operand, spec in zip(operands, specs, strict=True)
    ]
    found = run(*placed, jnp.asarray(SIZES), recipe)
    assert_diff_below(LAYER[recipe], found, truth(operands, SIZES))
    assert jax.typeof(found[4]).sharding.spec == P(None, "y")


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda up, down: up, ValueError, r"biases must be None or \(b_gate_up \(g, 2 f\)"),
        (
            lambda up, down: (up[1:], down),
            ValueError,
            r"biases must be .*, a row for each .*; got biases\[0\]",
        ),
        (
            lambda up, down: (up, down[0]),
            ValueError,
            r"biases must be .*, a row for each .*; got biases\[1\]",
        ),
        (lambda up, down: (up, down.astype(int)), TypeError, r"biases\[1\] must be bf16, f16 or f"),
        (lambda up, down: (1.0, down), TypeError, r"biases\[0\] must be an array; got float"),
    ],
)
def test_bad_biases_raise(change, error, message):
    x, w_gate_up, w_down, _ = problem()
    with raises(error, f"moe_mlp: {message}"):
        moe_mlp(x, w_gate_up, w_down, jnp.asarray(SIZES), biases=change(*biases_of()))
    x, indices, probs, *weights, _ = layer_problem()
    with raises(error, f"moe_layer: {message}"):
        moe_layer(x, (indices, probs), *weights, biases=change(*layer_biases()))
    assert x.shape == (M, LAYER_D)
