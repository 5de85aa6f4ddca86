"""stats.collect against NumPy: three quantisations of a matmul, in loops and transformations."""

import json
import warnings
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import undefined_rows
from errors import raises
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jax_fp8gemm
import jax_fp8gemm.nnx
from jax_fp8gemm import Recipe, matmul, stats
from jax_fp8gemm.moe.configs import MoEConfig

_FMAX = 448.0


def _expected(x, block_m):
    """The numbers of f32 (m, k) quantised with block_m x 128 blocks, whole ones, in e4m3fn."""
    m, k = x.shape
    blocks = x.astype(np.float64).reshape(m // block_m, block_m, k // 128, 128)
    scale = np.float32(np.abs(blocks).max((1, 3), keepdims=True) / _FMAX)
    scaled = np.float32(blocks) * (np.float32(1) / scale)
    quantised = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    error = np.linalg.norm(quantised * scale - blocks) / np.linalg.norm(blocks)
    flushed = np.sum((blocks != 0) & (quantised == 0)) / np.sum(blocks != 0)
    return dict(
        amax=np.abs(x).max(),
        flushed=flushed,
        saturated=0.0,
        scale_min=scale.min(),
        scale_max=scale.max(),
        error=error,
        nonfinite=0,
    )


def _check(record, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(record[name], value, rtol=2e-5, err_msg=name)


def _operand(seed, shape):
    """Normal numbers times powers of two, so that some of them are flushed to zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 1, size=shape)
    return x.astype(ml_dtypes.bfloat16)


_LHS, _RHS, _DOUT = _operand(0, (256, 128)), _operand(1, (128, 256)), _operand(2, (256, 256))


def _loss(lhs, rhs):
    with jax.named_scope("layer"):
        out = matmul(lhs, rhs, implementation="xla")
    return jnp.sum(out.astype(jnp.float32) * _DOUT.astype(np.float32))


def _find(found, **wanted):
    records = [r for r in found.records() if all(r[name] == x for name, x in wanted.items())]
    assert len(records) == 1, found
    return records[0]


def test_the_quantisations_of_a_matmul_and_its_gradients():
    step = jax.jit(jax.value_and_grad(_loss, argnums=(0, 1)))
    result, found = stats.collect(step)(_LHS, _RHS)
    jax.tree.map(np.testing.assert_array_equal, result, step(_LHS, _RHS))
    lhs, rhs, dout = (np.asarray(x, np.float32) for x in (_LHS, _RHS, _DOUT))
    assert len(found.records()) == 5
    assert {(r["path"], r["op"]) for r in found.records()} == {("layer", "matmul")}
    _check(_find(found, operand="lhs", blocks="row"), _expected(lhs, 1))
    _check(_find(found, operand="lhs", blocks="column"), _expected(lhs.T, 1))
    _check(_find(found, operand="rhs"), _expected(rhs, 128))
    _check(_find(found, operand="dout", blocks="row"), _expected(dout, 1))
    _check(_find(found, operand="dout", blocks="column"), _expected(dout.T, 1))
    assert all(r["flushed"] > 0.01 for r in found.records())
    assert {r["pass"] for r in found.records() if r["operand"] == "dout"} == {"backward"}


def test_a_scan_merges_its_iterations():
    scales = np.array([1, 64, 2.0**-30], np.float32)

    def step(lhs, rhs):
        body = lambda total, s: (total + jax.checkpoint(_loss)(lhs * s, rhs), None)
        return jax.lax.scan(body, jnp.float32(0), scales.astype(ml_dtypes.bfloat16))[0]

    result, found = stats.collect(jax.jit(jax.grad(step)))(_LHS, _RHS)
    np.testing.assert_array_equal(result, jax.jit(jax.grad(step))(_LHS, _RHS))
    lhs = np.asarray(_LHS, np.float32)
    each = [_expected(lhs * s, 1) for s in scales]
    forward = _find(stats.collect(jax.jit(step))(_LHS, _RHS)[1], operand="lhs")
    _check(forward, each[1] | dict(scale_min=min(e["scale_min"] for e in each)))
    assert {r["pass"] for r in found.records()} == {"recomputed", "backward"}


def test_a_while_loop_and_a_branch():
    def step(x, rhs):
        double = lambda x: matmul(x, rhs, implementation="xla").astype(x.dtype)
        keep = lambda x: x
        x = jax.lax.cond(x[0, 0] > 1e9, double, keep, x)
        return jax.lax.fori_loop(0, jnp.int32(x[0, 0] * 0) + 2, lambda _, x: double(x) * 0 + x, x)

    result, found = stats.collect(step)(_LHS, _RHS[:, :128])
    np.testing.assert_array_equal(result, _LHS)
    branch, loop = (r for r in found.records() if r["operand"] == "lhs")
    assert branch["amax"] == 0
    _check(loop, _expected(np.asarray(_LHS, np.float32), 1))


def test_nan_and_inf_are_counted():
    x = np.ones((128, 256), np.float32)
    x[3, 5], x[7, 200] = np.nan, np.inf
    (record,) = stats.collect(jax_fp8gemm.quantize)(x)[1].records()
    assert (record["nonfinite"], record["amax"], record["operand"]) == (2, 1, "x")
    assert record["error"] < 1e-6


def test_vmap_and_an_outer_jit():
    step = jax.vmap(lambda x: matmul(x, _RHS, implementation="xla"))
    lhs = np.stack([_LHS, _LHS * 4])
    _, found = jax.jit(stats.collect(step))(lhs)
    expected = _expected(np.asarray(lhs, np.float32).reshape(512, 128), 1)
    _check(_find(found, operand="lhs"), expected)


def test_a_shard_map_merges_its_devices():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("i")
    multiply = lambda x, w: matmul(x, w, implementation="xla")
    step = jax.shard_map(multiply, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)
    result, found = stats.collect(step)(_LHS, _RHS)
    np.testing.assert_array_equal(result, jax.jit(step)(_LHS, _RHS))
    _check(_find(found, operand="lhs"), _expected(np.asarray(_LHS, np.float32), 1))


def test_explicit_axes_give_the_numbers_of_one_device():
    multiply = lambda x: matmul(x, _RHS, implementation="xla")
    _, alone = stats.collect(multiply)(_LHS)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        _, found = stats.collect(multiply)(jax.device_put(_LHS, PartitionSpec("i", None)))
    np.testing.assert_allclose(found.rows, alone.rows, rtol=1e-5)


def test_a_shard_map_beside_explicit_axes():
    """Its rows and those of a product around it, also where only the arrays say the mesh."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    spec, product = PartitionSpec("i", None), lambda x, w: matmul(x, w, implementation="xla")
    x, w = (
        jax.device_put(jnp.ones((256, 256)), jax.NamedSharding(mesh, s))
        for s in (spec, PartitionSpec())
    )
    inside = jax.shard_map(product, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    collected = stats.collect(lambda x, w: product(inside(x, w), w))
    with jax.set_mesh(mesh):
        _, in_context = collected(x, w)
    _, found = collected(x, w)
    assert len(found.rows) == 4
    np.testing.assert_array_equal(found.rows, in_context.rows)


def test_a_program_without_fp8_says_so():
    x = jnp.ones((8, 128))
    _, found = stats.collect(lambda x: matmul(x, x.T, recipe="bf16"))(x)
    assert str(found) == "no operand was quantised: no product of jax_fp8gemm ran in FP8"
    assert str(jax_fp8gemm.explain(jnp.sin, x)) == "no op of jax_fp8gemm runs"


def test_what_is_no_function_is_refused():
    with raises(TypeError, match="^stats.collect: function must be callable; got f32"):
        stats.collect(jnp.ones(3))
    with raises(TypeError, match="^explain: function must be callable; got 3"):
        jax_fp8gemm.explain(3, jnp.ones(3))


def test_square_blocks_of_a_batch():
    """Each element of the batch has blocks of its own, however few its rows are."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (3, 4, 256)), jax.random.normal(keys[1], (256, 8))
    loss = lambda w, x: matmul(x, w, recipe=Recipe(wgrad_lhs_block=(128, 128))).sum()
    gradients = jax.vmap(jax.grad(loss), (None, 0))
    records = stats.collect(gradients)(w, x)[1].records()
    (block,) = (r for r in records if r["blocks"] == "block")
    assert (block["operand"], block["shape"]) == ("lhs", "3x256x4")
    assert 0.01 < block["error"] < 0.04 and block["flushed"] < 0.01


def test_a_gated_mlp_of_experts():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (256, 128), jnp.bfloat16)
    gate_up = jax.random.normal(keys[1], (2, 128, 256), jnp.bfloat16)
    down = jax.random.normal(keys[2], (2, 128, 128), jnp.bfloat16)
    sizes = jnp.array([100, 156], jnp.int32)

    def loss(x, gate_up, down):
        out = jax_fp8gemm.moe.moe_mlp(x, gate_up, down, sizes, implementation="xla")
        return out.astype(jnp.float32).sum()

    _, found = stats.collect(jax.grad(loss, argnums=(0, 1, 2)))(x, gate_up, down)
    records = found.records()
    assert found.missed == ()
    assert {r["operand"] for r in records} == {"lhs", "rhs", "dout"}
    assert {r["blocks"] for r in records} == {"row", "column", "block"}
    for record in records:
        assert record["saturated"] == record["nonfinite"] == 0
        assert 0 <= record["error"] < 0.04


@pytest.mark.parametrize("expert_axis", [None, "expert"])
def test_a_layer_of_experts(expert_axis):
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    x, logits = normal(0, 256, 128), normal(1, 256, 4)
    weights = normal(2, 4, 128, 256) / 16, normal(3, 4, 128, 128) / 16
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    on = {} if expert_axis is None else dict(expert_axis=expert_axis, mesh=mesh)
    how = dict(top_k=2, implementation="xla", **on)

    def loss(x, *weights):
        out = jax_fp8gemm.moe.moe_layer(x, logits, *weights, **how)
        return 1e6 * out.astype(jnp.float32).sum()

    _, found = stats.collect(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, *weights)
    records = found.records()
    assert {r["op"] for r in records} == {"moe_layer"} and found.missed == ()
    amax = lambda operand: [r["amax"] for r in records if r["operand"] == operand]
    # Two weights; x and h along both dimensions; dout and da, which are large, along both.
    assert len(amax("rhs")) == 2 and len(amax("lhs")) == 4 and len(amax("dout")) == 4
    assert max(amax("rhs")) < 0.5 < 1 < min(amax("lhs"))
    assert max(amax("lhs")) < 100 < 1e5 < min(amax("dout"))


def test_rows_of_no_group_do_not_count(traced_anew, monkeypatch):
    """The experts of a device leave them undefined: here NaN."""
    where = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 4)
    x, gate_up, down = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((64, 128), (4, 128, 256), (4, 128, 128)), strict=False)
    )
    logits = jax.random.normal(keys[3], (64, 4))

    def loss(x, gate_up, down):
        layer = partial(jax_fp8gemm.moe.moe_layer, top_k=2, expert_axis="x", mesh=where)
        return layer(x, logits, gate_up, down).astype(jnp.float32).sum()

    with_nan = undefined_rows.poison(monkeypatch)
    _, found = stats.collect(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, gate_up, down)
    records = found.records()
    assert with_nan
    of_turn = "128x128", "128x256"  # h and the gradient of gate_up
    rows = [r for r in records if r["shape"] in of_turn and r["blocks"] == "row"]
    assert {r["shape"] for r in rows} == set(of_turn)
    assert min(r["scale_min"] for r in rows) > 1e-6  # zeros would have 1e-31
    for record in records:
        assert record["nonfinite"] == 0 and record["amax"] > 0 and record["error"] < 0.04


def test_a_module_of_nnx():
    layer = jax_fp8gemm.nnx.Linear(128, 128, rngs=nnx.Rngs(0), implementation="xla")
    graph, state = cast(Any, nnx.split(layer))

    @stats.collect
    def grads(state, x):
        merge = partial(nnx.merge, graph)
        loss = lambda state, x: merge(state)(x).sum()
        return jax.value_and_grad(loss)(state, x)

    _, found = grads(state, jnp.ones((256, 128), jnp.float32))
    record = _find(found, operand="rhs")
    np.testing.assert_allclose(record["amax"], jnp.abs(state["kernel"].get_value()).max(), 1e-2)


class _Stack(nnx.Module):
    """A layer of ours, one of Flax's own, a mixture of experts, and a head."""

    def __init__(self, rngs):
        linear = partial(jax_fp8gemm.nnx.Linear, implementation="xla", rngs=rngs)
        self.layers = nnx.List([linear(128, 128), nnx.Linear(128, 128, rngs=rngs)])
        config = MoEConfig(hidden=128, intermediate=128, num_experts=2, top_k=1)
        self.experts = jax_fp8gemm.nnx.MoE(config, implementation="xla", rngs=rngs)
        self.head = linear(128, 128)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.experts(x))


def test_modules_of_nnx_have_their_paths():
    model, x = _Stack(nnx.Rngs(0)), jnp.ones((128, 128))
    before = model(x)
    jax_fp8gemm.nnx.name_scopes(model)
    np.testing.assert_array_equal(model(x), before)
    graph, state = cast(Any, nnx.split(model))
    call = lambda state, x: nnx.merge(graph, state)(x)
    _, found = stats.collect(call)(state, x)
    pairs = {(r["path"], r["op"]) for r in found.records()}
    assert pairs == {("layers/0", "matmul"), ("experts", "moe_layer"), ("head", "matmul")}
    records = jax_fp8gemm.explain(call, state, x).records
    assert {r["path"] for r in records} == {"layers/0", "experts", "head"}


def test_weights_quantised_once_have_the_paths_of_their_modules():
    model, x = _Stack(nnx.Rngs(0)), jnp.ones((128, 128))
    jax_fp8gemm.nnx.name_scopes(model)
    graph, state = cast(Any, nnx.split(model))

    def call(state, x):
        model = nnx.merge(graph, state)
        jax_fp8gemm.nnx.quantize_weights(model)
        return model(x)

    _, found = stats.collect(call)(state, x)
    weights = [r["path"] for r in found.records() if r["operand"] == "rhs"]
    assert sorted(weights) == ["experts", "experts", "head", "layers/0"]


def test_an_einsum_has_the_path_of_its_module():
    einsum = jax_fp8gemm.nnx.Einsum("td,df->tf", (128, 64), rngs=nnx.Rngs(0))
    model = nnx.Sequential(einsum)
    jax_fp8gemm.nnx.name_scopes(model)
    graph, state = cast(Any, nnx.split(model))
    _, found = stats.collect(lambda state, x: nnx.merge(graph, state)(x))(
        state, jnp.ones((128, 128))
    )
    assert {r["path"] for r in found.records()} == {"layers/0"}


def test_what_it_prints():
    _, found = stats.collect(_loss)(_LHS, _RHS)
    lines = str(found).splitlines()
    assert lines[0].split()[:5] == ["path", "op", "operand", "pass", "blocks"]
    assert [line.split()[2] for line in lines[1:]] == ["lhs", "rhs"]
    assert "<th>layer</th>" in found._repr_html_()
    assert json.loads(json.dumps(found.records())) == found.records()


def test_a_program_without_a_collector_stays_as_it_is():
    step = jax.jit(jax.grad(_loss))
    text = step.lower(_LHS, _RHS).as_text()
    stats.collect(step)(_LHS, _RHS)
    jax.clear_caches()
    assert jax.jit(jax.grad(_loss)).lower(_LHS, _RHS).as_text() == text


def test_changes_in_place_are_lost_with_a_warning():
    """Those of an NNX model by an optimiser; a functional step has the same records and none."""
    model = jax_fp8gemm.nnx.Linear(256, 128, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    loss = lambda model, x: jnp.square(model(x)).mean()

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))
        return loss(model, x)

    x = jax.random.normal(jax.random.key(0), (128, 256))
    for run in (step, nnx.jit(step)):
        with pytest.warns(UserWarning, match="stats.collect: function must return .* in place"):
            stats.collect(run)(model, optimizer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients, found = stats.collect(nnx.grad(loss))(model, x)
    assert {record["pass"] for record in found.records()} == {"forward", "backward"}
    before = model.kernel[...]
    optimizer.update(model, gradients)
    assert (model.kernel[...] != before).any()
