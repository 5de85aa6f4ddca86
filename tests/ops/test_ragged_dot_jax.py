"""ragged_dot under JAX's transformations: what is computed and kept, batching, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import assert_all_close, assert_close
from errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matmul_cases import random, saved_residuals
from meshes import mesh
from ragged_cases import SIZES, G, K, M, N, equations, int32, jitted, problem, truth, vjp

from jax_fp8gemm import BF16, CHECKPOINT_NAMES, DEEPSEEK_V3, quantize, ragged_dot

# What is computed, and kept


def test_forward_alone_quantises_no_columns():
    lhs, rhs, _ = problem()
    forward = equations(ragged_dot, lhs, rhs, int32(SIZES))
    assert forward == ["row", "block_transposed", "grouped_gemm"]


FORWARD = ["rows and columns", "block_both", "grouped_gemm"]


@pytest.mark.parametrize(
    "argnums, expected",
    [
        (0, ["row", "block_both", "grouped_gemm", "row", "grouped_gemm"]),
        (1, [*FORWARD, "columns", "grouped_wgrad"]),
        ((0, 1), [*FORWARD, "rows and columns", "grouped_gemm", "grouped_wgrad"]),
    ],
)
def test_only_what_a_wanted_gradient_needs_is_quantised(argnums, expected):
    lhs, rhs, _ = problem()
    loss = lambda lhs, rhs: ragged_dot(lhs, rhs, int32(SIZES)).sum()
    assert equations(jax.value_and_grad(loss, argnums), lhs, rhs) == expected


def test_scaled_rhs_is_not_quantised_again_nor_transposed():
    lhs, rhs, _ = problem()
    scaled = quantize(rhs, block=(128, 128), with_transpose=True)
    loss = lambda lhs, scaled: ragged_dot(lhs, scaled, int32(SIZES)).sum()
    gradient = jax.value_and_grad(loss)
    assert equations(gradient, lhs, scaled) == ["row", "grouped_gemm"] * 2
    text = str(jax.make_jaxpr(gradient)(lhs, scaled))
    assert f"f8_e4m3fn[{G},{N},{K}] = transpose" not in text


T = (M + 127 * G) // 128 * 128
RESIDUALS = [
    f"f8e4m3fn[{K},{T}]",
    f"f32[{K},{T // 128}]",
    f"f8e4m3fn[{G},{K},{N}]",
    f"f32[{G},3,2]",
]


def test_residuals_are_fp8_and_scales():
    lhs, rhs, _ = problem()
    product = lambda lhs, rhs: ragged_dot(lhs, rhs, int32(SIZES))
    assert saved_residuals(product, lhs, rhs) == sorted(RESIDUALS)


def test_checkpoint_by_name_saves_fp8_and_quantises_nothing_again():
    lhs, rhs, dout = problem()
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    layer = lambda lhs, rhs: jnp.tanh(ragged_dot(lhs, rhs, int32(SIZES)))
    saving, nothing = (
        jax.checkpoint(layer, policy=p) for p in (policy, jax.checkpoint_policies.nothing_saveable)
    )
    assert saved_residuals(saving, lhs, rhs) == sorted([*RESIDUALS, f"f32[{M},{N}]"])
    gradients = lambda f: jax.grad(lambda *x: (f(*x) * dout).sum(), (0, 1))
    text = lambda f: str(jax.make_jaxpr(gradients(f))(lhs, rhs))
    quantisations = [text(f).count("= jax_fp8gemm_quantize") for f in (saving, nothing)]
    assert quantisations == [3, 5]

    out, *_ = jitted()(lhs, rhs, int32(SIZES), dout)
    expected = jitted()(lhs, rhs, int32(SIZES), (1 - jnp.tanh(out) ** 2) * dout)[1:]
    for x, y in zip(jax.jit(gradients(saving))(lhs, rhs), expected, strict=True):
        # The cotangents are within an f32 rounding, which may move one of their FP8 roundings.
        assert reference.calc_diff(x, y) < 1e-6


def test_second_derivative_raises():
    lhs, rhs, _ = problem()
    loss = lambda lhs: (ragged_dot(lhs, rhs, int32(SIZES)) ** 2).sum()
    with raises(NotImplementedError, match="matmul, .* are differentiable once, .* is not"):
        jax.grad(lambda lhs: jax.grad(loss)(lhs).sum())(lhs)


# Transformations


@pytest.mark.parametrize(
    "in_axes, recipe",
    [
        ((0, None, None), DEEPSEEK_V3),
        ((None, 2, None), DEEPSEEK_V3),
        ((1, 0, 1), DEEPSEEK_V3),
        ((0, None, None), BF16),
        ((None, None, 0), BF16),
    ],
)
def test_vmap_of_value_and_gradients(in_axes, recipe):
    lhs, rhs, sizes = random(2, M, K), random(2, G, K, N, seed=1), int32([SIZES, (0, 90, 200, 5)])
    dout = problem()[2]
    place = lambda x, d: x[0] if d is None else jnp.moveaxis(x, 0, d)
    args = list(map(place, (lhs, rhs, sizes), in_axes))
    mapped = jax.jit(jax.vmap(functools.partial(vjp, recipe=recipe), (*in_axes, None)))
    found = mapped(*args, dout)
    for i in range(2):
        batched = zip((lhs, rhs, sizes), in_axes, strict=True)
        element = [x[0 if d is None else i] for x, d in batched]
        expected = truth(*element, dout)
        if not recipe.is_fp8:
            expected = [np.asarray(x, np.float64) for x in jitted(recipe=recipe)(*element, dout)]
        assert_all_close([x[i] for x in found], expected)


def test_donated_arguments():
    lhs, rhs = random(M, K), random(G, K, K, seed=1)
    donated = jnp.array(lhs)
    out = jax.jit(ragged_dot, donate_argnums=0)(donated, rhs, int32(SIZES))
    assert donated.is_deleted()
    assert_close(out, truth(lhs, rhs, SIZES, lhs)[0], jnp.float32)


def test_scan_over_layers():
    lhs, weights = random(M, K), random(2, G, K, K, seed=1) * 0.05
    layer = lambda x, w: ragged_dot(x, w, int32(SIZES))
    chain = lambda x, weights: jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
    found = jax.jit(jax.grad(lambda *x: (chain(*x) ** 2).sum(), 1))(lhs, weights)

    def step(x, i, dout=lhs):
        x, w, dout = (np.asarray(y, np.float32) for y in (x, weights[i], dout))
        return truth(x, w, SIZES, dout)

    middle = step(lhs, 0)[0]
    _, dmiddle, second = step(middle, 1, 2 * step(middle, 1)[0])
    # An f32 rounding between two products may move an FP8 rounding in the next.
    assert reference.calc_diff(found, np.stack([step(lhs, 0, dmiddle)[2], second])) < 1e-6


def test_export_round_trip():
    lhs, rhs, dout = problem()
    args = (lhs, rhs, int32(SIZES))
    exported = jax.export.export(jax.jit(ragged_dot))(*args)
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(*args), truth(lhs, rhs, SIZES, dout)[0], jnp.float32)


def test_named_scopes_reach_the_program():
    lhs, rhs, dout = problem()
    text = jitted().lower(lhs, rhs, int32(SIZES), dout).as_text(debug_info=True)
    inner = ("fp8gemm_quantize_ragged", "fp8gemm_grouped_gemm", "fp8gemm_grouped_wgrad")
    for scope in ("fp8gemm_ragged_dot", *inner, "dlhs", "drhs"):
        assert scope in text


# Operands on a mesh

HIGHEST = dict(precision="highest")


@pytest.mark.parametrize(
    "lhs_spec, rhs_spec, kwargs",
    [
        (P(None, "x"), P("x"), {}),
        (P("x"), P(None, None, "x"), HIGHEST),
    ],
)
def test_explicitly_sharded_operands_give_the_unsharded_result(lhs_spec, rhs_spec, kwargs):
    on = mesh(AxisType.Explicit)
    put = lambda x, spec: jax.device_put(x, NamedSharding(on, spec))
    lhs, rhs, dout = map(put, problem(), (lhs_spec, rhs_spec, P("x")))
    args = (lhs, rhs, put(int32(SIZES), P()), dout)
    out_sharding = NamedSharding(on, P("x"))
    found = jax.jit(functools.partial(vjp, **kwargs, out_sharding=out_sharding))(*args)
    expected = truth(lhs, rhs, SIZES, dout)
    for x, y, like in zip(found, expected, (dout, lhs, rhs), strict=True):
        assert jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec
        # Without FP8 the difference is that of its roundings.
        assert reference.calc_diff(x, y) < (2e-3 if kwargs else 1e-9)


@pytest.mark.parametrize(
    "axis_types, check_vma, kwargs",
    [
        ((AxisType.Explicit,), True, {}),
        ((AxisType.Auto,), True, HIGHEST),
        ((AxisType.Auto,), False, HIGHEST),
        ((AxisType.Auto, AxisType.Auto), True, {}),
    ],
)
def test_tokens_sharded_by_shard_map(axis_types, check_vma, kwargs):
    """Each device has tokens and group sizes of its own, and the weights of every group.

    Also over one of two axes.
    """
    on = mesh(*axis_types, shape=(4, 2)[: len(axis_types)])
    lhs, rhs, dout = problem()
    sizes = [(20, 0, 40, 5), (0, 0, 75, 0), (75, 0, 0, 0), (1, 2, 3, 4)]
    rows = M // 4

    def local(lhs, rhs, sizes, dout):
        out, dlhs, drhs = vjp(lhs, rhs, sizes[0], dout, **kwargs)
        # With check_vma JAX sums the cotangent of the replicated rhs.
        return out, dlhs, drhs if check_vma else jax.lax.psum(drhs, "x")

    specs = (P("x"), P(), P("x"), P("x"))
    sharded = jax.shard_map(
        local,
        mesh=on,
        in_specs=specs,
        out_specs=(P("x"), P("x"), P()),
        axis_names={"x"},
        check_vma=check_vma,
    )
    operands = zip((lhs, rhs, int32(sizes), dout), specs, strict=True)
    found = jax.jit(sharded)(*(jax.device_put(x, NamedSharding(on, spec)) for x, spec in operands))
    shards = [slice(i * rows, (i + 1) * rows) for i in range(4)]
    each = [truth(lhs[s], rhs, sizes[i], dout[s]) for i, s in enumerate(shards)]
    out, dlhs, drhs = zip(*each, strict=True)
    expected = (np.concatenate(out), np.concatenate(dlhs), sum(drhs))
    for x, y in zip(found, expected, strict=True):
        assert reference.calc_diff(x, y) < (2e-3 if kwargs else 1e-9)
