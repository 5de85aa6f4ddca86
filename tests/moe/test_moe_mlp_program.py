"""moe_mlp: what it computes and keeps, and how it composes with JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises
from jax.interpreters import partial_eval
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from moe_cases import SIZES, D, F, G, M, assert_mlp, problem, run, truth, vjp

from jax_fp8gemm import CHECKPOINT_NAMES, DEEPSEEK_V3
from jax_fp8gemm._data import checks
from jax_fp8gemm.moe import moe_mlp

# What is computed and kept


def equations(function, *args):
    """Our primitives that a jitted `function` is left with, in order, with their modes."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    ours = [eqn for eqn in jaxpr.eqns if eqn.primitive.name.startswith("jax_fp8gemm")]
    names = [eqn.primitive.name.removeprefix("jax_fp8gemm_") for eqn in ours]
    modes = [eqn.params.get("mode", "") for eqn in ours]
    return [f"{name} {mode}".strip() for name, mode in zip(names, modes, strict=True)]


def loss(x, w_gate_up, w_down, **kwargs):
    return (moe_mlp(x, w_gate_up, w_down, jnp.asarray(SIZES), **kwargs) ** 2).sum()


def test_every_array_is_quantised_once():
    operands = problem(f=128)[:3]  # whole blocks, which quantize folds into one equation
    found = equations(jax.value_and_grad(loss, (0, 1, 2)), *operands)
    assert found == [
        *["quantize block_both"] * 2,
        "quantize_ragged row_column",  # x
        "grouped_gemm",
        "swiglu_quantize row_column",
        "grouped_gemm",
        "quantize_ragged row_column",  # dout
        "grouped_gemm",
        "swiglu_grad_quantize row_column",
        "grouped_gemm",
        *["grouped_wgrad"] * 2,
    ]


@pytest.mark.parametrize(
    "argnum, modes, num_wgrads",
    [
        # Of x, h, dout and [dgate, dup].
        (0, ["row", "row", "row", "row"], 0),
        (1, ["row_column", "row", "row", "column"], 1),
        (2, ["row", "row_column", "column"], 1),
    ],
)
def test_only_what_a_wanted_gradient_needs_is_computed(argnum, modes, num_wgrads):
    found = equations(jax.value_and_grad(loss, argnum), *problem()[:3])
    ops = ["quantize_ragged", "swiglu_quantize", "quantize_ragged", "swiglu_grad_quantize"]
    quantised = [name for name in found if name.split()[0] in ops]
    assert quantised == [f"{op} {mode}" for op, mode in zip(ops, modes, strict=False)]
    assert found.count("grouped_wgrad") == num_wgrads


def test_without_a_gradient_nothing_is_quantised_along_the_rows():
    text = str(jax.make_jaxpr(loss)(*problem()[:3]))
    for word in ("row_column", "block_both", "quantize_ragged"):
        assert word not in text


def saved_residuals(*operands):
    """Types of what jax.vjp keeps, group_sizes aside."""
    mlp = lambda *args: moe_mlp(*args, jnp.asarray(SIZES))
    pullback = jax.eval_shape(lambda *args: jax.vjp(mlp, *args)[1], *operands)
    leaves = [x for x in jax.tree.leaves(pullback) if x.dtype != jnp.int32]
    return sorted(map(checks.short_type, leaves))


T = (M + 127 * G) // 128 * 128  # columns that hold the rows of all groups


def test_residuals_are_fp8_but_for_gate_up():
    columns = [f"f8e4m3fn[{D},{T}]", f"f8e4m3fn[{F},{T}]"]
    column_scales = [f"f32[{D},{T // 128}]", f"f32[{F},{T // 128}]"]
    weights = [f"f8e4m3fn[{G},{D},{2 * F}]", f"f8e4m3fn[{G},{F},{D}]"]
    weight_scales = [f"f32[{G},2,2]", f"f32[{G},1,2]"]
    expected = [*columns, *column_scales, *weights, *weight_scales, f"bf16[{M},{2 * F}]"]
    assert saved_residuals(*problem(jnp.bfloat16)[:3]) == sorted(expected)


def test_checkpoint_by_name_multiplies_nothing_again():
    *operands, dout = problem()
    mlp = lambda *args: moe_mlp(*args, jnp.asarray(SIZES))
    policies = jax.checkpoint_policies
    kept = {
        policies.save_only_these_names(*CHECKPOINT_NAMES): (4, 2, 1),
        # gate_up and the result: x, h and the weights are quantised again.
        policies.save_only_these_names("fp8gemm_out"): (4, 3, 2),
        policies.nothing_saveable: (5, 3, 2),
    }
    for policy, counts in kept.items():
        pull = lambda *args, p=policy: jax.vjp(jax.checkpoint(mlp, policy=p), *args)[1](dout)
        text = str(jax.make_jaxpr(pull)(*operands))
        names = ("grouped_gemm", "quantize_ragged", "swiglu_quantize")
        assert tuple(text.count(f"jax_fp8gemm_{name}[") for name in names) == counts


# Transformations


def test_vmap_is_one_element_after_another():
    x, *weights, dout = problem()
    xs, sizes = jnp.stack([x, dout]), jnp.asarray([SIZES, (40,) * 5])
    function = lambda x, sizes: vjp(x, *weights, dout, sizes, DEEPSEEK_V3)
    mapped = jax.jit(jax.vmap(function))(xs, sizes)
    for i in range(2):
        assert_mlp([result[i] for result in mapped], truth((xs[i], *weights, dout), sizes[i]))


def test_scan_over_layers():
    x, *weights, dout = problem()
    stacked = [jnp.stack([w, w[::-1]]) for w in weights]
    layer = lambda x, weights: (moe_mlp(x, *weights, jnp.asarray(SIZES)), None)
    run = lambda x, weights: jax.vjp(lambda *z: jax.lax.scan(layer, *z)[0], x, weights)[1](dout)
    dx, dweights = jax.jit(run)(x, stacked)
    middle, *_ = truth((x, *weights, dout))
    second = [w[::-1] for w in weights]
    _, dmiddle, *dsecond = truth((middle.astype(np.float32), *second, dout))
    _, expected, *dfirst = truth((x, *weights, dmiddle.astype(np.float32)))
    assert_near(dx, expected)
    for dw, first, last in zip(dweights, dfirst, dsecond, strict=True):
        assert_near(dw, np.stack([first, last]))


def assert_near(x, expected):
    # Two layers: what one rounds otherwise, the other quantises.
    assert reference.calc_diff(x, expected) < 1e-6


def test_operands_on_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    specs = P("data"), P(None, "data"), P(None, None, "data"), P("data")
    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        found = run(list(map(place, problem(), specs)))
    # Gradients are sharded as their operands, the result as x.
    placed = [P("data", None)] * 2 + [P(None, "data", None), P(None, None, "data")]
    assert [jax.typeof(x).sharding.spec for x in found] == placed
    assert_mlp(found, truth(problem()))


def test_rows_in_a_shard_map_sum_the_gradients_of_the_weights():
    x, *weights, dout = problem()
    sizes = np.array([(50, 30, 0, 0, 20), (0, 0, 100, 0, 0)])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = P("data")
    sharded = jax.shard_map(
        lambda x, sizes, *weights: moe_mlp(x, *weights, sizes[0]),
        mesh=mesh,
        in_specs=(rows, rows, P(), P()),
        out_specs=rows,
    )
    pull = lambda x, *w: jax.vjp(lambda x, *w: sharded(x, jnp.asarray(sizes), *w), x, *w)[1](dout)
    half = lambda i: slice(100 * i, 100 * i + 100)
    first, second = (truth((x[half(i)], *weights, dout[half(i)]), sizes[i])[1:] for i in range(2))
    expected = [np.concatenate([first[0], second[0]]), first[1] + second[1], first[2] + second[2]]
    assert_mlp(jax.jit(pull)(x, *weights), expected)


def test_second_derivative_raises():
    x, *weights, _ = problem()
    with raises(NotImplementedError, match="matmul, .* are differentiable once, .* is not"):
        jax.grad(lambda x: jax.grad(loss)(x, *weights).sum())(x)
