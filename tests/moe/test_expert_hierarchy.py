"""moe_layer with its experts along a pair of axes, hosts and their devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, assert_diff_below
from errors import raises
from jax.sharding import PartitionSpec as P
from meshes import collectives_outside_loops, mesh
from test_expert_parallel import (
    AUTO,
    EXPLICIT,
    TOP_K,
    D,
    E,
    F,
    M,
    auto_mesh,
    problem,
    program,
    truth,
    vjp,
)
from test_moe import random

from jax_fp8gemm import BF16, DEEPSEEK_V3, Recipe
from jax_fp8gemm.moe import moe_layer
from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec

BOTH = ("x", "y")
LOOPS_OF_ONE_TURN = 8  # of the references of products


def test_result_and_gradients_are_those_of_the_dense_layer():
    pairs = [
        program(shape=(2, 4), expert_axis=BOTH, exchange=exchange)
        for exchange in (("all_to_all", "all_gather"), ("ragged_all_to_all", "all_to_all"))
    ]
    found, other = (run(*problem()) for run in pairs)
    assert_diff_below(LAYER[DEEPSEEK_V3], found, truth())
    # All tokens to an expert of one device: the others have none.
    crowded, other_crowded = (run(*problem(50.0)) for run in pairs)
    assert_diff_below(LAYER[DEEPSEEK_V3], crowded, program()(*problem(50.0)))
    # In one turn no bit depends on the two exchanges.
    jax.tree.map(reference.assert_same_bits, (other, other_crowded), (found, crowded))


def test_turns_of_hosts_of_devices_and_of_rows_drop_no_token(traced_anew, monkeypatch):
    expected = program(exchange="all_gather")(*problem(5.0))
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 8)
    monkeypatch.setattr(_expert_spec, "_ROW_UNIT", 8)
    monkeypatch.setattr(_expert_spec, "_HEADROOM", 0.5)
    monkeypatch.setattr(_exchange, "_SLOT_UNIT", 1)
    monkeypatch.setattr(_exchange, "HEADROOM", 0.5)
    in_turns = program.__wrapped__(
        shape=(4, 2), expert_axis=BOTH, exchange=("all_to_all", "all_to_all")
    )
    lowered = in_turns.lower(*problem(5.0))
    # Those of turns, of the exchange and of rows in its first turn and in others, both passes.
    assert lowered.as_text().count("stablehlo.while") >= LOOPS_OF_ONE_TURN + 2 * 3
    found = lowered.compile()(*problem(5.0))
    # f32 sums in another order; the gradients of weights cut the tokens into other blocks.
    assert_diff_below(LAYER[BF16], found[:3], expected[:3])
    assert_diff_below(LAYER[DEEPSEEK_V3], found[3:], expected[3:])


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    layer = functools.partial(
        moe_layer, recipe=BF16, expert_axis=BOTH, exchange=("all_to_all", None)
    )
    each = P(BOTH)
    run = jax.shard_map(
        functools.partial(vjp, layer),
        mesh=auto_mesh(4, 2),
        in_specs=(each,) * 6,
        out_specs=(each,) * 5,
        check_vma=check_vma,
    )
    assert_diff_below(LAYER[BF16], jax.jit(run)(*problem()), truth())


def test_inside_vmap_and_scan():
    x, indices, probs, *weights, _ = problem()
    layer = functools.partial(
        moe_layer,
        mesh=auto_mesh(4, 2),
        expert_axis=BOTH,
        exchange=("all_to_all", "all_to_all"),
        recipe=BF16,
    )
    run = lambda x: layer(x, (indices, probs), *weights)
    both = jnp.stack([x, x[::-1]])
    expected = jax.jit(run)(x)
    for found in (
        jax.jit(jax.vmap(run))(both),
        jax.jit(lambda both: jax.lax.map(run, both))(both),
    ):
        reference.assert_same_bits(found[0], expected)
        assert not np.array_equal(found[1], expected)


def test_tokens_need_not_divide_evenly():
    x, *_, w_gate_up, w_down, _ = problem()
    x, logits = x[:61], random(M, E, seed=1)[:61]
    layer = functools.partial(moe_layer, top_k=TOP_K, recipe=BF16, return_load=True)
    out, load = jax.jit(layer)(x, logits, w_gate_up, w_down)
    where = dict(expert_axis=BOTH, mesh=mesh(EXPLICIT, AUTO, shape=(2, 4)))
    spread = functools.partial(layer, **where, exchange=("ragged_all_to_all", "all_gather"))
    found, found_load = jax.jit(spread)(x, logits, w_gate_up, w_down)
    np.testing.assert_array_equal(found_load, load)
    assert_diff_below(LAYER[BF16], [found], [out])


def test_one_copy_of_a_token_travels_to_a_host(traced_anew, monkeypatch):
    """Of tokens whose experts are in one of four groups, and so in one of four hosts."""
    monkeypatch.setattr(_exchange, "_SLOT_UNIT", 1)
    monkeypatch.setattr(_exchange, "HEADROOM", 1.0)
    m = 4 * M
    of_device = m // 8
    x, logits = random(m, D, seed=7), random(m, E, seed=8)
    *_, w_gate_up, w_down, _ = problem()
    # What travels has power-of-two scales; so has everything, and one device rounds as eight do.
    routing = dict(top_k=TOP_K, n_group=4, topk_group=1, recipe=Recipe(pow2_scale=True))
    layer = functools.partial(moe_layer, **routing)
    spread = functools.partial(
        layer, mesh=auto_mesh(4, 2), expert_axis=BOTH, exchange=("all_to_all", "all_gather")
    )
    compiled = jax.jit(spread).lower(x, logits, w_gate_up, w_down).compile()
    moved = collectives_outside_loops(compiled)
    # FP8 crosses hosts by all-to-all, in a part for each of four: together a row for each token.
    slots = of_device // 4
    assert [text for text in moved if "f8e4m3fn" in text] == [
        f"all-gather f8e4m3fn[{2 * 4 * slots},{D}]",
        f"all-to-all f8e4m3fn[{slots},{D}]",
    ]
    found = compiled(x, logits, w_gate_up, w_down)
    # f32 sums of a token's experts, in another order.
    assert_diff_below(1e-12, [found], [jax.jit(layer)(x, logits, w_gate_up, w_down)])


def test_bad_pairs_are_refused():
    x, indices, probs, *weights, _ = problem()
    call = functools.partial(moe_layer, x, (indices, probs), *weights, mesh=auto_mesh(4, 2))
    pair = ("all_to_all", "all_gather")
    names = "all_gather, all_to_all, ragged_all_to_all"
    for message, kwargs in (
        (
            "a pair of exchanges must go with a pair of mesh axes, .*; got .*, expert_axis x. Name",
            dict(expert_axis="x", exchange=pair),
        ),
        (
            f"a pair of exchanges must be two, each None or of {names}; got .*'ring'",
            dict(expert_axis=BOTH, exchange=("all_to_all", "ring")),
        ),
        ("a pair of exchanges must be two", dict(expert_axis=BOTH, exchange=(*pair, None))),
        (f"exchange must be None or of {names}; got ", dict(expert_axis=BOTH, exchange=[*pair])),
        ("expert_axis must name axes of the mesh, x, y; got z", dict(expert_axis=("x", "z"))),
        ("expert_axis must name each mesh axis once; got ", dict(expert_axis=("x", "x"))),
    ):
        with raises(ValueError, f"moe_layer: {message}"):
            call(**dict(exchange=pair) | kwargs)
    six = jnp.zeros((6, D, 2 * F)), jnp.zeros((6, F, D))
    with raises(ValueError, "the experts must divide evenly among the 8 devices of expert_axis"):
        moe_layer(
            x,
            (indices, probs),
            *six,
            mesh=auto_mesh(4, 2),
            expert_axis=BOTH,
            exchange=pair,
        )
