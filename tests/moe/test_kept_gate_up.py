"""gate_up kept in FP8: the default gradients of a gate_up that NumPy and ml_dtypes round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED, assert_all_same_bits, assert_diff_below
from gated_activations import GPT_OSS
from jax.sharding import PartitionSpec as P
from kept_gate_up_cases import (
    KEPT,
    RECIPES,
    assert_dx_and_dw_gate_up_moved,
    few_features,
    in_one_program,
    layer,
    mlp,
    reference_vjp,
    residuals,
    without,
)
from meshes import mesh
from moe_cases import D, F, G, M, problem, random
from test_expert_parallel import AUTO, E
from test_expert_parallel import problem as layer_problem

from jax_fp8gemm import DEEPSEEK_V3, quantize
from jax_fp8gemm._data import checks
from jax_fp8gemm.moe import configs, moe_mlp
from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec
from jax_fp8gemm.moe._parallel import mlp as _mlp
from jax_fp8gemm.moe._parallel.layer import expert_parallel_on_mesh


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_result_keeps_its_bits_and_gradients_move(dtype):
    *operands, dout = problem(dtype)
    found, default = (in_one_program(mlp(r), operands, dout) for r in (KEPT, DEEPSEEK_V3))
    assert_dx_and_dw_gate_up_moved(found, default)


@pytest.mark.parametrize(
    "name, dtype, how",
    [
        ("e4m3", jnp.bfloat16, {}),
        ("e4m3", jnp.float32, dict(implementation="emulate")),
        ("e5m2, pow2_scale", jnp.bfloat16, dict(implementation="xla")),
        ("square lhs", jnp.float32, dict(activation=GPT_OSS)),
    ],
)
def test_gradients_are_those_of_a_gate_up_that_numpy_rounds(name, dtype, how):
    recipe, formats = RECIPES[name]
    *operands, dout = problem(dtype)
    found = in_one_program(mlp(recipe, **how), operands, dout)
    default = mlp(without(recipe), **how)
    assert_all_same_bits(found, reference_vjp(default, operands, dout, 2 * F, **formats))


def test_biases_read_it_too():
    *operands, dout = problem()
    operands += random(G, 2 * F, seed=21), random(G, D, seed=22)
    run = lambda recipe: (
        lambda x, w_gate_up, w_down, *biases: mlp(recipe, biases=biases)(x, w_gate_up, w_down)
    )
    found = in_one_program(run(KEPT), operands, dout)
    expected = reference_vjp(run(DEEPSEEK_V3), operands, dout, 2 * F)
    assert_all_same_bits(found, expected)
    default = in_one_program(run(DEEPSEEK_V3), operands, dout)
    moved = [not np.array_equal(x, y) for x, y in zip(found, default, strict=True)]
    assert moved == [False, True, True, False, True, False]  # of b_gate_up, not of b_down


def test_a_nan_stays_in_its_row_and_its_expert():
    x, *weights, dout = problem()
    out, dx, dw_gate_up, _ = in_one_program(mlp(KEPT), (x.at[75, 3].set(jnp.nan), *weights), dout)
    for rows in (out, dx):
        np.testing.assert_array_equal(np.isnan(rows).any(axis=1), np.arange(M) == 75)
    np.testing.assert_array_equal(np.isnan(dw_gate_up).any(axis=(1, 2)), np.arange(G) == 3)


# Layers


def test_layer_on_one_device():
    operands, indices, dout, width = few_features()
    found = in_one_program(layer(KEPT, indices), operands, dout)
    expected = reference_vjp(layer(DEEPSEEK_V3, indices), operands, dout, width)
    assert_all_same_bits(found, expected)
    default = in_one_program(layer(DEEPSEEK_V3, indices), operands, dout)
    out, dx, dweights, dw_gate_up, dw_down = found
    assert_all_same_bits((dweights,), (default[2],))
    assert_dx_and_dw_gate_up_moved((out, dx, dw_gate_up, dw_down), (*default[:2], *default[3:]))


@pytest.mark.parametrize("parts", [1, 2])
def test_layer_of_several_devices(parts, traced_anew, monkeypatch):
    """Gradients of all operands read gate_up, h computed again from it."""
    operands, indices, dout, width = few_features()
    on = dict(mesh=mesh(AUTO), expert_axis="x", exchange="all_gather", parts=parts)
    found = in_one_program(layer(KEPT, indices, **on), operands, dout)
    default = layer(DEEPSEEK_V3, indices, **on)
    before = in_one_program(default, operands, dout)
    # Without the field, the columns of the h of an unquantised gate_up are kept.
    monkeypatch.setattr(_mlp, "_keeps_columns", lambda spec: False)
    expert_parallel_on_mesh.clear_cache()
    assert_all_same_bits(in_one_program(default, operands, dout), before)
    expected = reference_vjp(default, operands, dout, width)
    assert_all_same_bits(found, expected)
    assert_all_same_bits(found[:1], before[:1])
    for gradient, unquantised in zip(found[1:], before[1:], strict=True):
        assert 1e-4 < reference.calc_diff(gradient, unquantised) < 2e-3


def test_further_turns_round_as_the_first_one(traced_anew, monkeypatch):
    """Of rows, and of tokens that find no slot; gate_up is kept of the first turns alone."""
    x, indices, weights, *experts, dout = layer_problem(5.0)
    run = lambda exchange: in_one_program(
        layer(KEPT, indices, mesh=mesh(AUTO), expert_axis="x", exchange=exchange),
        (x, weights, *experts),
        dout,
    )
    expected = run("all_gather")
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 16)
    monkeypatch.setattr(_expert_spec, "_ROW_UNIT", 8)
    monkeypatch.setattr(_exchange, "_SLOT_UNIT", 1)
    found = run("all_to_all")
    # f32 sums in another order; a gate_up that is not rounded is off by 5e-4.
    assert_diff_below(1e-10, found[:3], expected[:3])


# Transformations


def test_vmap_is_one_element_after_another():
    x, *weights, dout = problem()
    xs = jnp.stack([x, dout])
    gradients = lambda x: jax.vjp(mlp(KEPT), x, *weights)[1](dout)
    for i, found in enumerate(zip(*jax.jit(jax.vmap(gradients))(xs), strict=True)):
        expected = in_one_program(mlp(KEPT), (xs[i], *weights), dout)[1:]
        assert_diff_below(REORDERED, found, expected)


def test_rows_in_a_shard_map():
    x, *weights, dout = problem()
    sizes = jnp.asarray([(50, 30, 0, 0, 20), (0, 0, 100, 0, 0)])
    rows = P("x")
    sharded = jax.shard_map(
        lambda x, sizes, *weights: moe_mlp(x, *weights, sizes[0], recipe=KEPT),
        mesh=mesh(AUTO, shape=(2,)),
        in_specs=(rows, rows, P(), P()),
        out_specs=rows,
    )
    run = lambda x, *weights: sharded(x, sizes, *weights)
    found = in_one_program(run, (x, *weights), dout)
    halves = slice(0, M // 2), slice(M // 2, M)
    one = lambda i: lambda *operands: moe_mlp(*operands, sizes[i], recipe=KEPT)
    first, second = (
        in_one_program(one(i), (x[half], *weights), dout[half]) for i, half in enumerate(halves)
    )
    for i in (0, 1):  # the result and dx
        reference.assert_same_bits(found[i], jnp.concatenate([first[i], second[i]]))
    sums = [x + y for x, y in zip(first[2:], second[2:], strict=True)]
    assert_diff_below(REORDERED, found[2:], sums)


def test_weights_without_a_gradient():
    x, *weights, dout = problem()
    scaled = [quantize(w, block=(128, 128), with_transpose=True) for w in weights]
    run = lambda x: mlp(KEPT)(x, *scaled)
    out, dx = in_one_program(run, (x,), dout)
    expected = in_one_program(mlp(KEPT), (x, *weights), dout)
    assert_all_same_bits((out, dx), expected[:2])


def test_modules_of_flax_keep_fp8():
    from flax import linen, nnx

    from jax_fp8gemm import linen as fp8_linen
    from jax_fp8gemm import nnx as fp8_nnx

    x = random(M, D)
    config = configs.MoEConfig(hidden=D, intermediate=F, num_experts=E, top_k=2)
    swiglu = fp8_nnx.SwiGLU(D, F, recipe=KEPT, rngs=nnx.Rngs(0))
    layer = fp8_nnx.MoE(config, recipe=KEPT, rngs=nnx.Rngs(0))
    of_linen: linen.Module = fp8_linen.MoE(config, options=dict(recipe=KEPT))
    variables = of_linen.init(jax.random.key(0), x)
    calls = {M: (swiglu,), 2 * M: (layer, lambda x: of_linen.apply(variables, x))}
    for rows, functions in calls.items():
        for function in functions:
            types = list(map(checks.short_type, residuals(function, x)))
            assert f"f8e4m3fn[{rows},{2 * F}]" in types
            assert f"f32[{rows},{2 * F}]" not in types
