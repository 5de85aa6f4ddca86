"""Strips of columns, in which the results of an expert-parallel layer travel back."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from reference import assert_same_bits
from test_expert_parallel import E, F, auto_mesh, vjp
from test_moe import random

from jax_fp8gemm import Recipe
from jax_fp8gemm.moe import moe_layer, route
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec
from jax_fp8gemm.moe._parallel import strips as _strips
from jax_fp8gemm.moe._parallel.exchange import NAMES

M, TOP_K, D = 64, 2, 512  # two strips are 256 columns each, four 128


@functools.cache
def problem(skew=0.0):
    """As that of test_expert_parallel, with more columns. skew: of logits to an expert."""
    logits = random(M, E, seed=1) + skew * jnp.eye(E)[2:3]
    weights = random(E, D, 2 * F, seed=2, scale=D**-0.5), random(E, F, D, seed=3, scale=F**-0.5)
    return random(M, D), *route(logits, TOP_K), *weights, random(M, D, seed=5)


def forward(mesh_shape=(4,), **options):
    """The layer alone: what is differentiated has no strips."""
    layer = functools.partial(moe_layer, mesh=auto_mesh(*mesh_shape), expert_axis="x", **options)
    return jax.jit(lambda x, indices, weights, *rest: layer(x, (indices, weights), *rest))


@pytest.fixture
def in_strips(traced_anew, monkeypatch):
    """A function that returns the result of `forward`, in so many strips, and the program."""

    def run(num_strips, operands, **options):
        # Of 4 devices with M / 4 tokens each, a device has the results of all others to send.
        num_bytes = M // 4 * 3 * D * 4 // num_strips
        monkeypatch.setattr(_strips, "_MIN_STRIP_BYTES", num_bytes)
        monkeypatch.setattr(_strips, "_NUM_STRIPS", num_strips)
        jax.clear_caches()
        compiled = forward(**options).lower(*operands).compile()
        return compiled(*operands), compiled

    return run


def returned(compiled):
    """The columns of each array that travels back; not those of the gradients of weights."""
    found = [re.fullmatch(rf"all-to-all f32\[{M // 4},(\d+)\]", x) for x in collectives(compiled)]
    return [width for x in found if x and (width := int(x[1])) > TOP_K]


def few_rows(monkeypatch):
    """More turns than one, where choices are uneven."""
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 16)
    monkeypatch.setattr(_expert_spec, "_ROW_UNIT", 8)


@pytest.mark.parametrize("num_strips", [2, 4])
@pytest.mark.parametrize("exchange", NAMES)
def test_strips_have_the_bits_of_the_whole(in_strips, exchange, num_strips):
    operands = problem()[:-1]
    expected = forward(exchange=exchange)(*operands)
    found, compiled = in_strips(num_strips, operands, exchange=exchange)
    assert_same_bits(found, expected)
    if exchange == "all_gather":
        assert returned(compiled) == [D // num_strips] * num_strips


@pytest.mark.parametrize(
    "recipe", [Recipe(fp8_combine=True), Recipe(batch_invariant=True)], ids=str
)
def test_strips_have_the_bits_of_the_whole_in_other_recipes(in_strips, recipe):
    operands = problem()[:-1]
    expected = forward(exchange="all_gather", recipe=recipe)(*operands)
    found, _ = in_strips(2, operands, exchange="all_gather", recipe=recipe)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("skew", [0.0, 8.0])
def test_devices_agree_whether_turns_are_left(in_strips, monkeypatch, skew):
    """With few rows of a turn, one device has rows left and the others have none."""
    operands = problem(skew)[:-1]
    few_rows(monkeypatch)
    expected = forward(exchange="all_gather")(*operands)
    found, compiled = in_strips(2, operands, exchange="all_gather")
    assert_same_bits(found, expected)
    # In the branch of one turn the strips, and the whole in the other.
    assert sorted(returned(compiled)) == [D // 2, D // 2, D]


def test_biases(in_strips):
    x, indices, weights, w_gate_up, w_down, _ = problem()
    biases = random(E, 2 * F, seed=7), random(E, D, seed=8)

    def run(*operands):
        return forward(exchange="all_gather", biases=biases)(*operands)

    operands = x, indices, weights, w_gate_up, w_down
    expected = run(*operands)
    found, _ = in_strips(2, operands, exchange="all_gather", biases=biases)
    assert_same_bits(found, expected)


def test_what_is_differentiated_has_no_strips(in_strips):
    """What the backward pass sends may then travel beside the products of the forward pass."""
    operands = problem()
    layer = functools.partial(moe_layer, mesh=auto_mesh(4), expert_axis="x", exchange="all_gather")
    in_strips(2, operands[:-1], exchange="all_gather")
    compiled = jax.jit(functools.partial(vjp, layer)).lower(*operands).compile()
    assert returned(compiled) == [D, D]  # out and dx


def test_a_device_has_at_most_1024_groups(in_strips, monkeypatch):
    operands = problem()[:-1]
    monkeypatch.setattr(_strips, "MAX_GROUPS", E // 4 * 2 - 1)
    _, compiled = in_strips(2, operands, exchange="all_gather")
    assert returned(compiled) == [D]


def test_vmap_over_tokens_and_choices(in_strips):
    x, indices, weights, *experts = problem()[:-1]
    twice = [jnp.stack([y, y[::-1]]) for y in (x, indices, weights)]

    def run(*operands):
        layer = forward(exchange="all_gather")
        return jax.vmap(layer, in_axes=(0, 0, 0, None, None))(*operands)

    expected = run(*twice, *experts)
    in_strips(2, (x, indices, weights, *experts), exchange="all_gather")
    assert_same_bits(run(*twice, *experts), expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_experts_along_one_of_two_axes(in_strips, monkeypatch, axis_type):
    """With weights whose features the other axis cuts."""
    on = mesh(axis_type, axis_type, shape=(4, 2))
    specs = *(P(("x", "y")),) * 3, P("x", None, "y"), P("x", "y")
    operands = [
        jax.device_put(y, NamedSharding(on, spec))
        for y, spec in zip(problem()[:-1], specs, strict=True)
    ]

    def compiled():
        layer = functools.partial(moe_layer, mesh=on, expert_axis="x", exchange="all_gather")
        run = jax.jit(lambda x, indices, weights, *rest: layer(x, (indices, weights), *rest))
        return run.lower(*operands).compile()

    whole = compiled()
    in_strips(2, problem()[:-1], exchange="all_gather")
    monkeypatch.setattr(_strips, "_MIN_STRIP_BYTES", 1)
    strips = compiled()
    kinds = [[x for x in collectives(c) if "all-to-all" in x] for c in (whole, strips)]
    assert kinds[0] == [f"all-to-all f32[{M // 8},{D}]"]
    assert kinds[1] == [f"all-to-all f32[{M // 8},{D // 2}]"] * 2
    assert_same_bits(strips(*operands), whole(*operands))


def test_experts_without_features(in_strips):
    """Empty arrays are cut into strips too. One device gives zeros."""
    x, indices, weights, w_gate_up, w_down, _ = problem()
    operands = x, indices, weights, w_gate_up[..., :0], w_down[:, :0]
    found, _ = in_strips(2, operands)
    assert_same_bits(found, jnp.zeros_like(x))
