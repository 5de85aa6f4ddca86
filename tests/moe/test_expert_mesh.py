"""moe_layer with expert_axis on meshes of several axes, and in shard_map."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, assert_diff_below
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from test_expert_parallel import (
    AUTO,
    EXPLICIT,
    TOP_K,
    D,
    E,
    M,
    auto_mesh,
    problem,
    truth,
    vjp,
)
from test_moe import random
from test_partition import place

from jax_fp8gemm import BF16, DEEPSEEK_V3, Recipe
from jax_fp8gemm.moe import moe_layer


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """With weights that do not vary over the other axis, whose gradients JAX sums."""
    layer = functools.partial(moe_layer, recipe=BF16, expert_axis="x")

    def gradients(*operands):
        _, dx, _, *dw = vjp(layer, *operands)
        return dx, *(dw if check_vma else jax.lax.psum(dw, "y"))

    tokens, experts = P(("x", "y")), P("x")
    sharded = jax.shard_map(
        gradients,
        mesh=auto_mesh(2, 2),
        in_specs=(tokens, tokens, tokens, experts, experts, tokens),
        out_specs=(tokens, experts, experts),
        check_vma=check_vma,
    )
    _, dx, _, *dw = truth()
    assert_diff_below(LAYER[BF16], jax.jit(sharded)(*problem()), (dx, *dw))


def test_logits_on_a_mesh_of_explicit_axes():
    where = mesh(EXPLICIT, EXPLICIT, shape=(2, 2))
    tokens, experts = P(("x", "y")), P("x")
    x, _, _, w_gate_up, w_down, _ = problem()
    operands = x, random(M, E, seed=1), w_gate_up, w_down
    operands = [
        jax.device_put(np.asarray(operand), NamedSharding(where, spec))
        for operand, spec in zip(operands, (tokens, tokens, experts, experts), strict=True)
    ]
    layer = functools.partial(moe_layer, top_k=TOP_K, recipe=BF16, expert_axis="x")
    out = jax.jit(layer)(*operands)
    assert jax.typeof(out).sharding.spec == P(("x", "y"), None)
    assert_diff_below(LAYER[BF16], [out], truth()[:1])


def test_operands_that_lie_on_no_mesh_yet():
    """The result is that of one device, which reads the same FP8 where scales are powers of two."""
    recipe = Recipe(pow2_scale=True)
    x, indices, probs, *weights, dout = problem()
    on = mesh(EXPLICIT, shape=(4,))
    layer = functools.partial(moe_layer, expert_axis="x", recipe=recipe)
    run = jax.jit(functools.partial(vjp, functools.partial(layer, mesh=on)))
    out, *gradients = run(x, indices, probs, *weights, dout)
    assert_diff_below(LAYER[DEEPSEEK_V3], gradients, truth()[1:])
    one = jax.jit(functools.partial(moe_layer, recipe=recipe))(x, (indices, probs), *weights)
    # f32 sums of a token's experts, in another order.
    assert_diff_below(1e-12, [out], [one])
    with jax.set_mesh(on):
        as_numpy = jax.tree.map(np.asarray, (x, (indices, probs), *weights))
        reference.assert_same_bits(jax.jit(layer)(*as_numpy), out)


WIDE_D, WIDE_F = 256, 128


@functools.cache
def run_wide(axis_type, *weight_specs):
    """What moves on a mesh whose tokens lie along both axes, and vjp of the layer."""
    where, tokens = mesh(axis_type, axis_type, shape=(4, 2)), P(("x", "y"))
    x, dout = random(M, WIDE_D), random(M, WIDE_D, seed=5)
    weights = random(E, WIDE_D, 2 * WIDE_F, seed=2) / 16, random(E, WIDE_F, WIDE_D, seed=3) / 16
    _, indices, probs, *_ = problem()
    specs = tokens, tokens, tokens, *weight_specs, tokens
    place = lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(where, spec))
    operands = [*map(place, (x, indices, probs, *weights, dout), specs)]
    jitted = jax.jit(
        functools.partial(vjp, functools.partial(moe_layer, expert_axis="x", mesh=where)),
        out_shardings=tuple(NamedSharding(where, specs[i]) for i in (0, 0, 1, 3, 4)),
    )
    compiled = jitted.lower(*operands).compile()
    return collectives(compiled), compiled(*operands)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_weights_sharded_along_another_axis_are_gathered_as_fp8(axis_type):
    d, f = WIDE_D, WIDE_F
    moved, found = run_wide(axis_type, P("x", "y"), P("x", None, "y"))
    # One program for both kinds of axes: what else moves is the same.
    moved_else, expected = run_wide(AUTO, P("x"), P("x"))
    jax.tree.map(reference.assert_same_bits, found, expected)
    gathers = sorted((Counter(moved) - Counter(moved_else)).elements())
    # Each once for both passes. NOTE: on Explicit axes with JAX 0.12, XLA does not see that the
    # gathers of the two passes are the same, so there each is gathered twice.
    times = 2 if axis_type == EXPLICIT and jax.__version_info__ >= (0, 12) else 1
    assert [text for text in gathers if "f8e4m3fn" in text] == sorted(
        times * [f"all-gather f8e4m3fn[2,{x}]" for x in (f"{d},{2 * f}", f"{f},{d}")]
    )
    wide = [text for text in gathers if "f8e4m3fn" not in text and str(d) in text]
    assert wide == []  # but scales, of blocks
    # Each device gets the sums of a shard.
    sums = [text for text in moved if text.startswith(("all-reduce", "reduce-scatter"))]
    assert sums == [
        f"reduce-scatter f32[2,{d // 2},{2 * f}]",
        f"reduce-scatter f32[2,{f // 2},{d}]",
    ]


@pytest.mark.parametrize("axis_type, check_vma", [(AUTO, True), (EXPLICIT, False)])
def test_inside_a_shard_map_over_another_axis(axis_type, check_vma):
    """Which cuts the tokens; the gradients of weights are summed over it."""
    on = mesh(axis_type, axis_type, shape=(2, 4))
    layer = functools.partial(moe_layer, expert_axis="y")

    def run(*operands):
        if axis_type == EXPLICIT:  # as the result will lie
            operands = *operands[:-1], jax.sharding.reshard(operands[-1], P("y"))
        *results, dw_gate_up, dw_down = vjp(layer, *operands)
        add = lambda dw: dw if check_vma else jax.lax.psum(dw, "x")
        return *results, add(dw_gate_up), add(dw_down)

    of_tokens, of_weights = P("x"), P()
    specs = *(of_tokens,) * 3, *(of_weights,) * 2, of_tokens
    sharded = jax.shard_map(
        run,
        mesh=on,
        in_specs=specs,
        out_specs=(*(of_tokens,) * 3, *(of_weights,) * 2),
        axis_names={"x"},
        check_vma=check_vma,
    )
    placed = place(on, problem(), specs)
    assert_diff_below(LAYER[DEEPSEEK_V3], jax.jit(sharded)(*placed), truth())


def test_no_tokens_of_several_dimensions_on_an_explicit_mesh():
    x, _, _, *weights, _ = problem()
    with jax.set_mesh(mesh(EXPLICIT, EXPLICIT, shape=(2, 4))):
        none = jax.device_put(np.zeros((2, 0, D), x.dtype), P("x"))
        out = moe_layer(none, jnp.zeros((2, 0, E)), *weights, top_k=TOP_K)
    assert out.shape == (2, 0, D)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_gradient_of_logits_inside_a_shard_map_over_another_axis(axis_type, check_vma):
    """As of the layer on the tokens of that shard_map's devices, one after another."""
    on = mesh(axis_type, axis_type, shape=(2, 4))
    x, _, _, *weights, _ = problem()
    logits, bias = random(M, E, seed=1), np.linspace(-0.1, 0.1, E, dtype=np.float32)
    layer = functools.partial(moe_layer, top_k=TOP_K, expert_axis="y")
    run = lambda x, logits, bias, *weights: layer(x, logits, *weights, bias=bias)
    specs = P("x"), P("x"), *(P(),) * 3
    sharded = jax.shard_map(
        run, mesh=on, in_specs=specs, out_specs=P("x"), axis_names={"x"}, check_vma=check_vma
    )

    def dlogits(run, *operands):
        loss = lambda logits, x, *others: (run(x, logits, *others) ** 2).sum()
        x, logits, *others = operands
        return jax.jit(jax.grad(loss))(logits, x, *others)

    found = dlogits(sharded, *place(on, (x, logits, bias, *weights), specs))
    with jax.set_mesh(auto_mesh(1, 4)):
        expected = [
            dlogits(run, x[part], logits[part], bias, *weights)
            for part in (slice(M // 2), slice(M // 2, M))
        ]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, M // 4), (2, 2, M // 4)])
def test_leading_dimensions_that_an_explicit_mesh_cuts_in_part(shape):
    on = mesh(EXPLICIT, EXPLICIT, shape=(2, 4))
    x, indices, probs, *weights, _ = problem()
    folded = [a.reshape(*shape, -1) for a in (x, indices, probs)]
    specs = P("x"), P("x"), P("x"), P("y"), P("y")
    x, indices, probs, *weights = place(on, (*folded, *weights), specs)
    with jax.set_mesh(on):
        out = jax.jit(functools.partial(moe_layer, expert_axis="y"))(x, (indices, probs), *weights)
    assert out.sharding.is_equivalent_to(NamedSharding(on, P("x")), out.ndim)
    assert_diff_below(LAYER[DEEPSEEK_V3], [out.reshape(M, D)], truth()[:1])
