"""moe_layer whose devices divide their tokens into parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, REORDERED, assert_diff_below
from errors import raises
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from test_expert_parallel import AUTO, EXPLICIT, D, E, truth_of, vjp
from test_expert_parallel import problem as whole_problem
from test_partition import place
from test_shared_expert import expected as shared_truth
from test_shared_expert import shared_weights

from jax_fp8gemm import BF16, DEEPSEEK_V3
from jax_fp8gemm.moe import moe_layer
from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec
from jax_fp8gemm.moe._parallel.parts import sizes_of_parts

M = 56  # 14 tokens a device: four parts are of 3 and of 4 tokens


@functools.cache
def problem(skew=0.0):
    return tuple(x[:M] if x.shape[0] != E else x for x in whole_problem(skew))


@functools.cache
def truth():
    return truth_of(problem())


def layer(parts, exchange="all_gather", recipe=DEEPSEEK_V3, where=None):
    where = where or mesh(AUTO)
    how = dict(expert_axis="x", mesh=where, exchange=exchange, recipe=recipe)
    return functools.partial(moe_layer, parts=parts, **how)


@functools.cache
def program(*arguments):
    """vjp of the layer, compiled once for all tests."""
    return jax.jit(functools.partial(vjp, layer(*arguments))).lower(*problem()).compile()


def assert_same_for_tokens(found, expected):
    """The results and the gradients of x; for the weights of choices XLA adds in its own order."""
    jax.tree.map(reference.assert_same_bits, found[:2], expected[:2])
    assert_diff_below(REORDERED, found[2:3], expected[2:3])


@pytest.mark.parametrize("parts, exchange", [(4, "all_gather"), (2, "ragged_all_to_all")])
def test_tokens_get_the_bits_of_one_part(parts, exchange):
    found = program(parts, exchange)(*problem())
    assert_same_for_tokens(found, program(1, "all_gather")(*problem()))
    # Gradients of weights cut the tokens of an expert into other blocks.
    assert_diff_below(LAYER[DEEPSEEK_V3], found, truth())


def test_every_part_has_collectives_of_its_own():
    moved = collectives(program(4, "all_gather"))
    for size in (3, 4):
        # Of two parts, each for x and for dout.
        assert moved.count(f"all-gather f8e4m3fn[{4 * size},{D}]") == 4
        assert moved.count(f"all-to-all f32[{size},{D}]") == 4


@pytest.mark.parametrize("experts", [(0, 1), (6, 1)], ids=["one device", "two devices"])
def test_devices_that_get_no_token(experts):
    x, indices, *rest = problem()
    operands = x, jnp.zeros_like(indices) + jnp.asarray(experts, jnp.int32)[None], *rest
    found, expected = (program(parts, "all_gather")(*operands) for parts in (4, 1))
    assert_same_for_tokens(found, expected)
    assert_diff_below(LAYER[DEEPSEEK_V3], found[3:], expected[3:])
    for gradient in found[3:]:
        assert not np.asarray(gradient)[[e for e in range(E) if e not in experts]].any()


def test_turns_that_hold_less_than_the_rows_of_a_part(traced_anew, monkeypatch):
    """Of rows, and of tokens that find no slot."""
    expected = program(1, "all_gather")(*problem(5.0))
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 8)
    monkeypatch.setattr(_expert_spec, "_ROW_UNIT", 8)
    monkeypatch.setattr(_exchange, "_SLOT_UNIT", 1)
    found = program.__wrapped__(2, "all_to_all")(*problem(5.0))
    # f32 sums in another order; the gradients of weights cut the tokens into other blocks.
    assert_diff_below(LAYER[BF16], found[:3], expected[:3])
    assert_diff_below(LAYER[DEEPSEEK_V3], found[3:], expected[3:])


def test_tokens_that_travel_unquantised():
    assert_diff_below(LAYER[BF16], program(2, "all_to_all", BF16)(*problem()), truth())


def test_an_explicit_mesh_and_a_shared_expert():
    """On eight devices with 7 tokens each."""
    where = mesh(EXPLICIT, EXPLICIT, shape=(4, 2))

    def run(x, indices, probs, w_gate_up, w_down, dout, *shared):
        call = functools.partial(layer(2, "all_to_all", where=where), shared_expert=shared)
        return vjp(call, x, indices, probs, w_gate_up, w_down, dout)

    tokens, experts = P(("x", "y")), P("x")
    specs = *(tokens,) * 3, experts, experts, tokens, P(), P()
    placed = place(where, (*problem(), *shared_weights()), specs)
    found = jax.jit(run)(*placed)
    out, dx, *others = map(np.asarray, truth())
    added = (added[:M] for added in shared_truth()[:2])
    out, dx = (x + y for x, y in zip((out, dx), added, strict=True))
    assert_diff_below(LAYER[DEEPSEEK_V3], found, (out, dx, *others))


def test_in_a_shard_map_under_vmap_and_scan():
    """Of two problems at once, in two layers, on one device after another."""
    x, indices, probs, *weights, _ = problem()
    call = functools.partial(moe_layer, parts=2, expert_axis="x", exchange="all_gather")

    def two_layers(x, indices, probs, w_gate_up, w_down):
        step = lambda x, _: (call(x, (indices, probs), w_gate_up, w_down), None)
        return jax.lax.scan(step, x, length=2)[0]

    sharded = jax.shard_map(two_layers, mesh=mesh(AUTO), in_specs=P("x"), out_specs=P("x"))
    stacked = jnp.stack([x, 2 * x])
    found = jax.jit(jax.vmap(sharded, in_axes=(0, *(None,) * 4)))(stacked, indices, probs, *weights)
    run = lambda x: program(1, "all_gather")(x, *problem()[1:])[0]
    expected = jnp.stack([run(run(x)) for x in stacked])
    reference.assert_same_bits(found, expected)


def test_sizes_of_parts():
    assert sizes_of_parts(14, 4) == [3, 4, 3, 4]
    assert sizes_of_parts(3, 4) == [1, 1, 1]
    assert sizes_of_parts(0, 2) == [0] and sizes_of_parts(8, 1) == [8]


def test_a_capacity_holds_for_all_parts_together():
    x, indices, probs, *weights, _ = problem(5.0)
    run = lambda parts: jax.jit(functools.partial(layer(parts), capacity_factor=1.5))
    found, expected = (run(parts)(x, (indices, probs), *weights) for parts in (2, 1))
    reference.assert_same_bits(found, expected)


def test_the_chosen_number_of_parts(traced_anew, monkeypatch):
    """Is that of the model, which is given the sizes of a device."""
    asked = []
    monkeypatch.setattr(_expert_spec, "choose_parts", lambda *sizes: asked.append(sizes) or 2)
    x, indices, probs, *weights, _ = problem()
    lowered = jax.jit(layer(None)).lower(x, (indices, probs), *weights)
    # Values, scales, indices and weights of two parts.
    assert lowered.as_text().count("stablehlo.all_gather") == 2 * 4
    ((exchange, *sizes),) = asked
    assert (exchange.size, exchange.tokens, exchange.top_k) == (4, 14, 2)
    assert sizes == [E // 4, D, 64, jnp.float32, False]


def test_bad_parts_are_refused():
    x, indices, probs, *weights, _ = problem()
    call = functools.partial(moe_layer, x, (indices, probs), *weights)
    for parts in (3, 0, "2", 8):
        with raises(ValueError, f"moe_layer: parts must be None, 1, 2 or 4; got {parts!r}"):
            call(parts=parts, expert_axis="x", mesh=mesh(AUTO))
    for parts in (2, None):
        with raises(ValueError, "moe_layer: exchange, parts and mesh must go with expert_axis"):
            call(parts=parts)
