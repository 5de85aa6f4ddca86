"""gated_mlp against the fake-quantised MLP in float64, and what it moves on a mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from moe_cases import F, assert_mlp, problem, truth

from jax_fp8gemm import BF16, DEEPSEEK_V3, Recipe, quantize, quantize_weight
from jax_fp8gemm.moe import gated_mlp

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SQUARE_LHS = Recipe(wgrad_lhs_block=(128, 128))
E5M2 = dict(bwd=reference.E5M2, pow2=True)


def operands_of(m, dtype=jnp.float32, **dims):
    x, w_gate_up, w_down, dout = problem(dtype, m=m, g=1, **dims)
    return x, w_gate_up[0], w_down[0], dout


def vjp(x, w_gate_up, w_down, dout, **how):
    out, pullback = jax.vjp(functools.partial(gated_mlp, **how), x, w_gate_up, w_down)
    return out, *pullback(dout)


def expected_of(operands, **how):
    x, w_gate_up, w_down, dout = operands
    d = x.shape[-1]
    flat = x.reshape(-1, d), w_gate_up[None], w_down[None], dout.reshape(-1, d)
    out, dx, dw_gate_up, dw_down = truth(flat, (len(flat[0]),), **how)
    return out.reshape(x.shape), dx.reshape(x.shape), dw_gate_up[0], dw_down[0]


@pytest.mark.parametrize("m", [256, 200, 1])
@pytest.mark.parametrize(
    "recipe, how, dtype",
    [
        (DEEPSEEK_V3, {}, jnp.bfloat16),
        (DEEPSEEK_V3, {}, jnp.float32),
        (Recipe(bwd="e5m2", pow2_scale=True), E5M2, jnp.float16),
        (SQUARE_LHS, dict(lhs_block=(128, 128)), jnp.float32),
    ],
)
def test_value_and_gradients_are_those_of_the_fake_quantised_mlp(m, recipe, how, dtype):
    operands = operands_of(m, dtype)
    assert_mlp(
        jax.jit(functools.partial(vjp, recipe=recipe))(*operands),
        expected_of(operands, **how),
        dtype,
    )


def test_blocks_of_tokens_are_counted_over_all_leading_dimensions():
    operands = [
        x.reshape(3, 5, 32, -1) if i in (0, 3) else x for i, x in enumerate(operands_of(480))
    ]
    assert_mlp(vjp(*operands), expected_of(operands))


def test_no_tokens():
    found = vjp(*operands_of(0))
    assert [x.shape for x in found] == [(0, 256), (0, 256), (256, 2 * F), (F, 256)]
    assert not any(x.any() for x in found)


def test_no_features():
    assert gated_mlp(jnp.ones((3, 2, 0)), jnp.ones((0, 256)), jnp.ones((128, 0))).shape == (3, 2, 0)


@pytest.mark.parametrize("kind", [quantize_weight, functools.partial(quantize, block=(128, 128))])
def test_weights_quantised_before_give_the_same_bits(kind):
    x, *weights, dout = operands_of(256)
    out, dx, *dws = vjp(x, *weights, dout)
    quantised = [kind(w) for w in weights]
    run = lambda x, *ws: gated_mlp(x, *ws)
    found, pullback = jax.vjp(lambda x: run(x, *quantised), x)
    reference.assert_same_bits(found, out)
    reference.assert_same_bits(*pullback(dout), dx)
    if kind is quantize_weight:
        _, pullback = jax.vjp(run, x, *quantised)
        for dw, expected in zip(pullback(dout)[1:], dws, strict=True):
            reference.assert_same_bits(dw.weight, expected)


def test_a_nan_stays_in_its_token_and_in_the_gradients_of_weights():
    x, *weights, dout = operands_of(256)
    out, dx, dw_gate_up, dw_down = vjp(x.at[7, 3].set(jnp.nan), *weights, dout)
    for rows in (out, dx):
        is_nan = np.isnan(rows).any(axis=1)
        assert is_nan[7] and is_nan.sum() == 1
    assert np.isnan(dw_gate_up).any() and np.isnan(dw_down).all(axis=1).any()


def test_derivatives_that_do_not_exist_name_the_op():
    x, *weights, dout = operands_of(128)
    run = functools.partial(gated_mlp, w_gate_up=weights[0], w_down=weights[1])
    with raises(NotImplementedError, "gated_mlp: must be differentiated in reverse mode"):
        jax.jvp(run, (x,), (dout,))


# A few tokens without a gradient, whose rows the first product quantises itself. 2 f = 4096
# columns get tiles of 32.


def few_tokens():
    return operands_of(5, jnp.bfloat16, d=256, f=2048)[:3]


def test_few_tokens_without_a_gradient_take_three_kernels():
    x, w_gate_up, w_down = few_tokens()
    w = [quantize_weight(w) for w in (w_gate_up, w_down)]
    lowered = jax.jit(gated_mlp).trace(x, *w).lower(lowering_platforms=("cuda",))
    kernels = re.findall(r"custom_call @jax_fp8gemm_(\w+)", lowered.as_text())
    assert kernels == ["quantizing_gemm", "swiglu_quantize", "gemm"]
    reference.assert_same_bits(gated_mlp(x, *w), jax.vjp(gated_mlp, x, *w)[0])


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_few_tokens_on_a_mesh(axis_type):
    """Features of gate | up are cut in the first product, and contracted in the second."""
    x, w_gate_up, w_down = few_tokens()
    expected = gated_mlp(x, w_gate_up, w_down)
    on_mesh = mesh(axis_type)
    put = lambda y, *spec: jax.device_put(y, NamedSharding(on_mesh, P(*spec)))
    operands = put(x), put(w_gate_up, "x"), put(w_down, "x")
    assert reference.calc_diff(jax.jit(gated_mlp)(*operands), expected) < 1e-5


@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("spec", [P(None, "x"), P("x", "y"), P("y")], ids=str)
def test_leading_dimensions_stay_cut_by_explicit_axes(spec, recipe):
    x, w_gate_up, w_down, dout = operands_of(512)
    x, dout = (y.reshape(4, 128, -1) for y in (x, dout))
    run = jax.jit(functools.partial(vjp, recipe=recipe))
    expected = run(x, w_gate_up, w_down, dout)
    on_mesh = mesh(EXPLICIT, EXPLICIT, shape=(2, 2))
    put = lambda y, spec: jax.device_put(y, NamedSharding(on_mesh, spec))
    found = run(put(x, spec), put(w_gate_up, P()), put(w_down, P()), put(dout, spec))
    assert found[0].sharding.is_equivalent_to(NamedSharding(on_mesh, spec), 3)
    for y, z in zip(found, expected, strict=True):
        assert reference.calc_diff(y, z) < 1e-6


# On a mesh. Tokens and weights are cut over the same axis, as in FSDP.

TOKENS, HIDDEN, INTER = 2048, 512, 1024
GATHERED = ["f8e4m3fn[512,2048]", "f32[4,16]", "f8e4m3fn[1024,512]", "f32[8,4]"]


@functools.cache
def fsdp_problem():
    return operands_of(TOKENS, d=HIDDEN, f=INTER)


@functools.cache
def on_one_device(recipe):
    return jax.device_get(jax.jit(functools.partial(vjp, recipe=recipe))(*fsdp_problem()))


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "recipe",
    [DEEPSEEK_V3, SQUARE_LHS, Recipe(kept_gate_up="fp8"), Recipe(reduce_dtype="bf16")],
    ids=["deepseek_v3", "square lhs", "kept in fp8", "bf16 sums"],
)
def test_tokens_and_weights_over_one_axis(axis_type, recipe):
    """Each weight is gathered once, in FP8, and its gradient is scattered. No activation moves."""
    rows = NamedSharding(mesh(axis_type), P("x"))
    operands = [jax.device_put(np.asarray(x), rows) for x in fsdp_problem()]
    shardings = {} if axis_type == EXPLICIT else dict(out_shardings=(rows,) * 4)
    run = jax.jit(functools.partial(vjp, recipe=recipe), **shardings)
    compiled = run.lower(*operands).compile()
    moved = collectives(compiled)
    sums = ["reduce-scatter f32[256,512]", "reduce-scatter f32[128,2048]"]
    once = sorted([*(f"all-gather {array}" for array in GATHERED), *sums])
    # Explicit axes gather values for each pass, and what they gather is a type of the program.
    assert moved == once if axis_type == AUTO else set(moved) == set(once)
    found, expected = compiled(*operands), on_one_device(recipe)
    for x in found:
        assert x.sharding.is_equivalent_to(rows, 2)
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert reference.calc_diff(x, y) < 1e-6  # a rounding of f32 may move an FP8 value
    bound = 1e-5 if recipe.reduce_dtype == "bf16" else 1e-9  # 2^-9, squared, and f32 sums
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert reference.calc_diff(x, y) < bound


@pytest.mark.parametrize("recipe", [BF16, Recipe(wgrad="bf16")], ids=["bf16", "bf16 wgrad"])
@pytest.mark.parametrize("specs", [(P("x"), P(None, "x"), P("x")), (P(None, "x"), P("x"), P())])
def test_recipes_with_unquantised_activations_on_an_explicit_mesh(specs, recipe):
    """Of an axis that cuts tokens and features, or the dimension that is contracted."""
    *operands, dout = operands_of(256, d=512, f=256)
    run = jax.jit(functools.partial(vjp, recipe=recipe))
    cut = [
        jax.device_put(np.asarray(x), NamedSharding(mesh(EXPLICIT), spec))
        for x, spec in zip((*operands, dout), (*specs, specs[0]), strict=True)
    ]
    for x, y, like in zip(run(*cut), run(*operands, dout), (cut[0], *cut[:3]), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, 2)
        assert reference.calc_diff(x, y) < 1e-6


def test_tokens_that_do_not_divide_into_blocks_are_gathered():
    """300 tokens on 4 devices: no device has whole blocks of 128."""
    rows = NamedSharding(mesh(AUTO), P("x"))
    whole = NamedSharding(mesh(AUTO), P())
    operands = operands_of(300)
    expected = jax.jit(vjp)(*operands)
    placed = [jax.device_put(x, rows if x.shape[0] == 300 else whole) for x in operands]
    assert_mlp(jax.jit(vjp)(*placed), [np.asarray(y, np.float64) for y in expected])


def test_vmap_is_one_element_after_another():
    operands = operands_of(128)
    batch = [jnp.stack([x, 2 * x]) for x in operands]
    found = jax.vmap(vjp)(*batch)
    for i in range(2):
        for x, y in zip(found, vjp(*(b[i] for b in batch)), strict=True):
            reference.assert_same_bits(x[i], y)
