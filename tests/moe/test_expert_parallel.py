"""moe_layer with its experts along a mesh axis, against all experts of all tokens in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, REORDERED, assert_diff_below
from errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from test_moe import expert, random
from xla_options import AS_USERS_DO

from jax_fp8gemm import BF16, DEEPSEEK_V3, Recipe, quantize
from jax_fp8gemm.moe import moe_layer, route
from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec
from jax_fp8gemm.moe._parallel.exchange import NAMES

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
M, E, TOP_K, D, F = 64, 8, 2, 128, 64


@functools.cache
def problem(skew=0.0):
    """x (m, d), indices and weights (m, top_k), w_gate_up (e, d, 2 f), w_down (e, f, d), dout.

    Not logits, so that all programs have the bits of one softmax. skew: of logits to an expert.
    """
    logits = random(M, E, seed=1) + skew * jnp.eye(E)[2:3]
    weights = random(E, D, 2 * F, seed=2, scale=D**-0.5), random(E, F, D, seed=3, scale=F**-0.5)
    return random(M, D), *route(logits, TOP_K), *weights, random(M, D, seed=5)


def vjp(layer, x, indices, weights, w_gate_up, w_down, dout):
    """The result, and the gradients of x, weights, w_gate_up and w_down."""
    function = lambda x, weights, *rest: layer(x, (indices, weights), *rest)
    out, pullback = jax.vjp(function, x, weights, w_gate_up, w_down)
    return out, *pullback(dout)


def dense(x, router, w_gate_up, w_down):
    """All experts of all tokens, weighted; in the precision of x."""
    indices, weights = router
    is_chosen = indices[:, :, None] == jnp.arange(E, dtype=indices.dtype)[None, None]
    chosen = jnp.where(is_chosen, weights[:, :, None], 0)
    outs = jnp.stack([expert(x, w_gate_up[i], w_down[i]) for i in range(E)], axis=1)
    return (outs * chosen.sum(axis=1)[:, :, None]).sum(axis=1)


@functools.cache
def truth():
    return truth_of(problem())


def truth_of(operands):
    """The layer and its gradients in float64. Operands are made outside, or would be float64."""
    with jax.enable_x64(True):
        exact = lambda x: x if x.dtype == jnp.int32 else jnp.asarray(x, jnp.float64)
        return jax.jit(functools.partial(vjp, dense))(*map(exact, operands))


def auto_mesh(*shape):
    return mesh(*(AUTO,) * len(shape), shape=shape)


@functools.cache
def program(shape=(4,), expert_axis="x", recipe=DEEPSEEK_V3, exchange=None):
    """vjp of the layer, compiled once for all tests."""
    layer = functools.partial(
        moe_layer,
        mesh=auto_mesh(*shape),
        expert_axis=expert_axis,
        recipe=recipe,
        exchange=exchange,
    )
    return jax.jit(functools.partial(vjp, layer))


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(exchange="all_gather"),
        dict(shape=(4, 2), expert_axis="y"),
        dict(recipe=Recipe(wgrad_lhs_block=(128, 128)), exchange="all_gather"),
        dict(recipe=BF16, exchange="all_gather"),
        dict(shape=(2, 2), expert_axis=("x", "y"), recipe=BF16),
    ],
    ids=["fp8", "tokens along another axis too, fp8", "square lhs", "bf16", "two axes, bf16"],
)
def test_result_and_gradients_are_those_of_the_dense_layer(kwargs):
    found = program(**kwargs)(*problem())
    is_bf16 = kwargs.get("recipe") == BF16
    assert_diff_below(LAYER[BF16 if is_bf16 else DEEPSEEK_V3], found, truth())


@pytest.mark.parametrize("recipe", LAYER, ids=["bf16", "fp8"])
def test_every_exchange_and_every_run_gives_the_same_bits(recipe):
    expected = program(recipe=recipe, exchange="all_gather")(*problem())
    for name in NAMES:
        found = program(recipe=recipe, exchange=name)(*problem())
        jax.tree.map(reference.assert_same_bits, found, expected)


def test_three_tokens_on_four_devices():
    """XLA for CPUs lost tokens of an exchange that read one sender after the other."""
    x, indices, weights, w_gate_up, w_down, dout = problem()
    few = x[:3], indices[:3], weights[:3], w_gate_up, w_down, dout[:3]
    expected = truth_of(few)
    for name in NAMES:
        of_name = program(shape=(2, 2), expert_axis="y", recipe=BF16, exchange=name)
        compiled = of_name.lower(*few).compile(compiler_options=AS_USERS_DO)
        assert_diff_below(LAYER[BF16], compiled(*few), expected)


def test_results_travel_as_fp8_where_the_recipe_says_so():
    recipe = dataclasses.replace(DEEPSEEK_V3, fp8_combine=True)
    compiled = program(recipe=recipe, exchange="all_gather").lower(*problem()).compile()
    found = compiled(*problem())
    assert_diff_below(LAYER[DEEPSEEK_V3], found, truth())
    # Another rounding of results and of the gradient of x alone.
    in_f32 = program(exchange="all_gather")(*problem())
    jax.tree.map(reference.assert_same_bits, found[2:], in_f32[2:])
    assert not any(np.array_equal(x, y) for x, y in zip(found[:2], in_f32[:2], strict=True))
    # Of each token and device, once each way.
    returned = [text for text in collectives(compiled) if "all-to-all f8e4m3fn" in text]
    assert returned == [f"all-to-all f8e4m3fn[{M // 4},{D}]"] * 2
    x, indices, probs, *weights, _ = problem()
    layer = functools.partial(moe_layer, expert_axis="x", mesh=auto_mesh(4), recipe=recipe)
    out = jax.jit(functools.partial(layer, exchange="all_to_all"))(x, (indices, probs), *weights)
    reference.assert_same_bits(out, found[0])


def test_turns_that_hold_less_than_the_rows_drop_none(traced_anew, monkeypatch):
    """Of rows, and of tokens that find no slot."""
    expected = program(exchange="all_gather")(*problem(5.0))
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 16)
    monkeypatch.setattr(_expert_spec, "_ROW_UNIT", 8)
    monkeypatch.setattr(_exchange, "_SLOT_UNIT", 1)
    in_turns = program.__wrapped__(exchange="all_to_all")
    assert num_loops(in_turns) > num_loops(program(exchange="all_gather"))
    found = in_turns(*problem(5.0))
    # f32 sums in another order; the gradients of weights cut the tokens into other blocks.
    assert_diff_below(LAYER[BF16], found[:3], expected[:3])
    assert_diff_below(LAYER[DEEPSEEK_V3], found[3:], expected[3:])


def num_loops(program):
    return program.lower(*problem(5.0)).as_text().count("stablehlo.while")


def test_a_call_outside_jit_compiles_once():
    x, indices, probs, *weights, dout = problem()
    layer = functools.partial(moe_layer, expert_axis="x", mesh=auto_mesh(4))
    run = lambda: (
        layer(x, (indices, probs), *weights),
        vjp(layer, x, indices, probs, *weights, dout),
    )
    out, (differentiated, *gradients) = run()
    reference.assert_same_bits(differentiated, out)
    compiled_out, *compiled = program()(*problem())
    reference.assert_same_bits(out, compiled_out)
    for gradient, expected in zip(gradients, compiled, strict=True):
        # XLA fuses the sum of a weight's gradient with what is around it in the one program.
        assert reference.calc_diff(gradient, expected) < REORDERED
    events = []
    listener = lambda event, _, **__: events.append(event)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.tree.map(reference.assert_same_bits, run(), (out, (out, *gradients)))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not [event for event in events if "compile" in event]


def test_rows_hold_an_expert_that_a_token_chooses_twice():
    """Of one expert on each of eight devices."""
    x, indices, probs, *weights, _ = problem(5.0)
    operands = x, (indices[:, [0, 0]], probs), *weights
    layer = functools.partial(moe_layer, mesh=auto_mesh(8), expert_axis="x")
    found, expected = (jax.jit(function)(*operands) for function in (layer, dense))
    assert reference.calc_diff(found, expected) < LAYER[DEEPSEEK_V3]


def test_weights_quantised_once_and_leading_dimensions():
    x, indices, probs, *weights, _ = problem()
    layer = functools.partial(moe_layer, expert_axis="x", mesh=auto_mesh(4))
    quantised = [quantize(w, block=(128, 128), with_transpose=True) for w in weights]
    grid = lambda x: x.reshape(4, M // 4, -1)
    out = jax.jit(layer)(grid(x), (grid(indices), grid(probs)), *quantised)
    expected = program(exchange="all_gather")(*problem())[0]
    reference.assert_same_bits(out.reshape(M, D), expected)


def test_a_capacity_keeps_the_first_choices_of_each_device():
    x, indices, probs, *weights, dout = problem(5.0)
    factor = 1.5
    kept = np.asarray(indices).reshape(4, -1).copy()
    for choices in kept:
        for e in range(E):
            choices[np.flatnonzero(choices == e)[int(np.ceil(factor * choices.size / E)) :]] = E
    assert (kept == E).any()
    expected = program(exchange="all_gather")(
        x, jnp.asarray(kept.reshape(M, TOP_K)), probs, *weights, dout
    )[0]
    layer = functools.partial(moe_layer, expert_axis="x", mesh=auto_mesh(4), capacity_factor=factor)
    for name in ("all_gather", "all_to_all"):
        limited = jax.jit(functools.partial(layer, exchange=name))
        reference.assert_same_bits(limited(x, (indices, probs), *weights), expected)


def test_a_capacity_in_bf16_holds_fewer_rows():
    layer = functools.partial(moe_layer, expert_axis="x", mesh=auto_mesh(4), capacity_factor=2.5)
    run = jax.jit(functools.partial(vjp, functools.partial(layer, recipe=BF16)))
    compiled = run.lower(*problem()).compile()
    # Of all choices, M * TOP_K, what two experts take of each device.
    rows = 4 * (E // 4) * int(np.ceil(2.5 * M // 4 * TOP_K / E))
    assert rows == 80 and f"f32[80,{2 * F}]" in compiled.as_text()
    assert_diff_below(LAYER[BF16], compiled(*problem()), truth())


def test_gradients_of_weights_are_added_in_the_dtype_of_the_recipe():
    """Over the axis that cuts the tokens but not the experts."""
    where = dict(shape=(4, 2), expert_axis="y")
    sums = dataclasses.replace(DEEPSEEK_V3, reduce_dtype="bf16")
    in_f32, in_bf16 = (program(**where, recipe=r)(*problem()) for r in (DEEPSEEK_V3, sums))
    jax.tree.map(reference.assert_same_bits, in_bf16[:3], in_f32[:3])
    for found, expected in zip(in_bf16[3:], in_f32[3:], strict=True):
        assert not np.array_equal(found, expected)
        # Each of four is rounded to 8 bits, and so is the sum.
        np.testing.assert_allclose(found, expected, atol=2**-7 * np.abs(expected).max())


def test_tokens_of_no_expert_are_zero_and_so_are_their_gradients():
    x, indices, *rest = problem()
    indices = indices.at[5].set(-1).at[9].set(E)
    results = program(exchange="all_gather")(x, indices, *rest)
    for result in results[:3]:
        np.testing.assert_array_equal(np.asarray(result)[[5, 9]], 0)


def test_a_large_capacity_is_none():
    x, indices, probs, *weights, _ = problem()
    call = functools.partial(moe_layer, x, (indices, probs), *weights)
    on_mesh = functools.partial(call, expert_axis="x", mesh=auto_mesh(4))
    for run in (call, on_mesh):
        np.testing.assert_array_equal(run(capacity_factor=1e300), run())


@pytest.mark.parametrize("num_tokens, axis_type", [(2, AUTO), (62, EXPLICIT)])
def test_tokens_need_not_divide_evenly(num_tokens, axis_type):
    """The tokens that make them divide choose no expert: they are in no result and no load."""
    x, indices, probs, *weights, dout = problem()
    rows = slice(0, num_tokens)
    x, dout, logits = x[rows], dout[rows], random(M, E, seed=1)[rows]
    where = mesh(axis_type, axis_type, shape=(2, 2))

    def loss(x, logits, *weights, **kwargs):
        out, load = moe_layer(x, logits, *weights, top_k=TOP_K, return_load=True, **kwargs)
        return jnp.vdot(out, dout), (out, load)

    run = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    (_, (expected, load)), gradients = jax.jit(run)(x, logits, *weights)
    on_mesh = jax.jit(functools.partial(run, expert_axis="x", mesh=where))
    on_y = jax.device_put(x, NamedSharding(where, P("y")))  # cuts 2 and 62 evenly
    (_, (found, found_load)), found_gradients = on_mesh(on_y, logits, *weights)
    assert found.shape == x.shape
    if axis_type is EXPLICIT:
        assert found.sharding.spec == found_gradients[0].sharding.spec == P("y", None)
    np.testing.assert_array_equal(found_load, load)
    # One device has scales of any size; what travels has powers of two.
    assert_diff_below(LAYER[DEEPSEEK_V3], (found, *found_gradients), (expected, *gradients))


def test_bad_operands_are_refused():
    x, indices, probs, *weights, _ = problem()
    where = auto_mesh(4)
    call = functools.partial(moe_layer, x, (indices, probs), *weights)
    for message, kwargs in (
        ("expert_axis must be an axis of a mesh; got none", dict(expert_axis="x")),
        ("expert_axis must name axes of the mesh, x; got z", dict(expert_axis="z", mesh=where)),
        ("expert_axis must name each mesh axis once", dict(expert_axis=("x", "x"), mesh=where)),
        (
            "exchange must be None or of all_gather, all_to_all, ragged_all_to_all; got 'ring'",
            dict(expert_axis="x", mesh=where, exchange="ring"),
        ),
        ("capacity_factor must be None or above 0; got 0", dict(capacity_factor=0)),
    ):
        with raises(ValueError, f"moe_layer: {message}"):
            call(**kwargs)
    with raises(TypeError, "moe_layer: expert_axis must be the name of a mesh axis"):
        call(expert_axis=0, mesh=where)
    call = functools.partial(moe_layer, expert_axis="x", mesh=where)
    message = (
        "moe_layer: with a capacity_factor, .* divide evenly among the 4 devices of the mesh axes"
    )
    with raises(ValueError, message):
        call(x[:63], (indices[:63], probs[:63]), *weights, capacity_factor=1.5)
    with raises(ValueError, "the experts must divide evenly among the 4 .*; got 6. Add experts"):
        call(x, (indices, probs), *(w[:6] for w in weights))
    with raises(ValueError, "w_down must hold an expert; got f32"):
        call(x, (indices, probs), *(w[:0] for w in weights))
    many = [jnp.zeros((4 * 1025, *w.shape[1:])) for w in weights]
    with raises(ValueError, "moe_layer: a device must hold at most 1024 experts; got 1025"):
        call(x, (indices, probs), *many)
    with raises(TypeError, "moe_layer: recipe must be a jax_fp8gemm.Recipe, .*; got None"):
        call(x, (indices, probs), *weights, recipe=None)
    with raises(ValueError, f"router must have one logit for each of the {E} experts"):
        call(x[:0], jnp.zeros((0, E + 1)), *weights, top_k=2)
    inside = jax.shard_map(call, mesh=where, in_specs=P("x"), out_specs=P("x"))
    with raises(ValueError, "mesh must be None inside a shard_map over expert_axis; got Mesh"):
        inside(x, (indices, probs), *weights)
