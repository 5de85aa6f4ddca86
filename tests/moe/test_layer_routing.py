"""moe_layer with the arguments of route: what it does is route, then the layer of these choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED
from errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from test_moe import random

from jax_fp8gemm import BF16, DEEPSEEK_V3
from jax_fp8gemm.moe import moe_layer, route

M, E, TOP_K, D, F = 64, 16, 3, 128, 64
ROUTING = dict(scoring="sigmoid", n_group=4, topk_group=2, scale=2.5)
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
recipes = pytest.mark.parametrize("recipe", [BF16, DEEPSEEK_V3], ids=["bf16", "fp8"])


def problem():
    """x, logits, bias, w_gate_up, w_down."""
    weights = random(E, D, 2 * F, seed=2, scale=D**-0.5), random(E, F, D, seed=3, scale=F**-0.5)
    return random(M, D), random(M, E, seed=1), random(E, seed=4, scale=0.3), *weights


def layer(x, logits, bias, *weights, **kwargs):
    how = dict(top_k=TOP_K, bias=bias, return_load=True, **ROUTING)
    return moe_layer(x, logits, *weights, **how, **kwargs)


def in_two_steps(x, logits, bias, *weights, **kwargs):
    *router, load = route(logits, TOP_K, bias=bias, return_load=True, **ROUTING)
    return moe_layer(x, tuple(router), *weights, **kwargs), load


def gradients(function, operands):
    """The gradients of all operands, and the load."""
    loss = lambda *operands: (lambda out, load: ((out**2).sum(), load))(*function(*operands))
    return jax.grad(loss, tuple(range(5)), has_aux=True)(*operands)


def expected_load():
    """How often NumPy finds each expert among the choices."""
    _, logits, bias, *_ = problem()
    indices, _ = route(logits, TOP_K, bias=bias, **ROUTING)
    return np.bincount(np.asarray(indices).reshape(-1), minlength=E)


@recipes
def test_on_one_device(recipe):
    run = functools.partial(layer, recipe=recipe)
    expected = functools.partial(in_two_steps, recipe=recipe)
    found, load = jax.jit(run)(*problem())
    # XLA fuses the sum over experts with what is around it, and then rounds it at other places.
    assert reference.calc_diff(found, jax.jit(expected)(*problem())[0]) < REORDERED
    np.testing.assert_array_equal(load, expected_load())
    assert load.dtype == jnp.int32
    (*found, _), (*expected, _) = (gradients(f, problem()) for f in (run, expected))
    jax.tree.map(reference.assert_same_bits, found, expected)
    assert np.any(found[0][1]) and not np.any(found[0][2])  # of the logits; of the bias


def on_a_mesh(axis_type, operands):
    """The operands on a mesh that cuts tokens and experts along x, tokens along y as well."""
    where = mesh(axis_type, axis_type, shape=(4, 2))
    tokens, experts = P(("x", "y")), P("x")
    specs = tokens, tokens, P("y"), experts, experts
    place = lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(where, spec))
    return where, [*map(place, operands, specs)]


@AXIS_TYPES
@recipes
def test_experts_along_a_mesh_axis(recipe, axis_type):
    """The bias is cut along an axis too; the load is that of all tokens."""
    where, placed = on_a_mesh(axis_type, problem())
    how = dict(recipe=recipe, expert_axis="x", mesh=where)
    run = functools.partial(layer, **how)
    found, load = jax.jit(run)(*placed)
    np.testing.assert_array_equal(load, expected_load())
    assert load.sharding.is_fully_replicated
    x, logits, bias, *weights = problem()
    router = route(logits, TOP_K, bias=bias, **ROUTING)
    expected = jax.jit(functools.partial(moe_layer, **how))(x, router, *weights)
    assert reference.calc_diff(found, expected) < REORDERED


def test_the_gradients_of_experts_along_a_mesh_axis():
    _, placed = on_a_mesh(AxisType.Explicit, problem())
    run = functools.partial(layer, recipe=BF16, expert_axis="x")
    found, load = jax.jit(functools.partial(gradients, run))(placed)
    expected, _ = gradients(functools.partial(in_two_steps, recipe=BF16), problem())
    for gradient, truth in zip(found, expected, strict=True):
        assert reference.calc_diff(gradient, truth) < REORDERED or not np.any(truth)
    assert not np.any(found[2])
    np.testing.assert_array_equal(load, expected_load())


def test_explicit_axes_without_an_expert_axis():
    where, placed = on_a_mesh(AxisType.Explicit, problem())
    with jax.set_mesh(where):
        found, load = jax.jit(functools.partial(layer, recipe=BF16))(*placed)
    expected, _ = layer(*problem(), recipe=BF16)
    assert reference.calc_diff(found, expected) < REORDERED
    np.testing.assert_array_equal(load, expected_load())


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map_the_load_is_that_of_the_device(check_vma):
    where = mesh(AxisType.Auto, shape=(4,))

    def run(*operands):
        out, load = layer(*operands, recipe=BF16, expert_axis="x")
        return out, load[None], jax.lax.psum(load, "x")

    tokens = P("x")
    specs = dict(in_specs=(tokens, tokens, P(), tokens, tokens), out_specs=(tokens, tokens, P()))
    sharded = jax.shard_map(run, mesh=where, **specs, check_vma=check_vma)
    out, loads, load = jax.jit(sharded)(*problem())
    np.testing.assert_array_equal(load, expected_load())
    np.testing.assert_array_equal(np.sum(loads, axis=1), [M // 4 * TOP_K] * 4)
    assert reference.calc_diff(out, layer(*problem(), recipe=BF16)[0]) < REORDERED


@pytest.mark.parametrize("options", [{}, dict(expert_axis="x")], ids=str)
def test_the_load_counts_choices_that_the_capacity_drops(options):
    options = options and options | dict(mesh=mesh(AxisType.Auto, shape=(4,)))
    _, load = jax.jit(functools.partial(layer, recipe=BF16, capacity_factor=0.5, **options))(
        *problem()
    )
    np.testing.assert_array_equal(load, expected_load())


def test_the_load_of_choices_made_elsewhere():
    """A choice of no expert counts nowhere."""
    x, logits, _, *weights = problem()
    indices, shares = route(logits, TOP_K)
    indices = indices.at[0].set(jnp.asarray([-1, E, 2**31 - 1]))
    _, load = moe_layer(x, (indices, shares), *weights, recipe=BF16, return_load=True)
    np.testing.assert_array_equal(load, np.bincount(indices[1:].reshape(-1), minlength=E))


def test_leading_dimensions_and_no_tokens():
    x, logits, bias, *weights = problem()
    out, load = layer(x.reshape(4, -1, D), logits.reshape(4, -1, E), bias, *weights, recipe=BF16)
    reference.assert_same_bits(out.reshape(M, D), layer(*problem(), recipe=BF16)[0])
    np.testing.assert_array_equal(load, expected_load())
    out, load = layer(x[:0], logits[:0], bias, *weights)
    assert out.shape == (0, D) and not np.any(load)


X, LOGITS = jnp.ones((4, 8)), jnp.ones((4, 6))
EXPERTS = jnp.ones((6, 8, 8)), jnp.ones((6, 4, 8))
CHOICES = jnp.zeros((4, 1), jnp.int32), X[:, :1]


@pytest.mark.parametrize(
    "router, options, error, message",
    [
        (CHOICES, dict(bias=X[0], scale=2.0), ValueError,
         r"scale, bias must go with router logits; got scale 2\.0, bias f32\[8\] with \(indices"),
        (CHOICES, dict(n_group=2, topk_group=1), ValueError, "n_group, topk_group must go with"),
        (LOGITS, dict(bias=X[0]), ValueError, r"each of 6 experts; got bias f32\[8\]"),
        (LOGITS, dict(n_group=4, topk_group=1), ValueError, "n_group must divide the experts"),
        (LOGITS, dict(scale="2"), TypeError, "scale must be a number of Python or NumPy; got '2'"),
        (LOGITS, dict(return_load=1), TypeError, "return_load must be True or False; got 1"),
    ],
)  # fmt: skip
def test_bad_routing_raises(router, options, error, message):
    with raises(error, match="moe_layer: .*" + message):
        moe_layer(X, router, *EXPERTS, top_k=1, **options)
