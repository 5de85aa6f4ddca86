"""Modules of Flax whose weights are quantised once: the bits of the modules with plain weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises
from flax import linen as nn
from flax import nnx
from flax.errors import ScopeParamShapeError

from jax_fp8gemm import (
    QuantizedWeight,
    Recipe,
    ScaledArray,
    dot_general,
    linen,
    master_weights,
    moe,
    quantize,
    quantize_weight,
)
from jax_fp8gemm import nnx as ours

bf16 = jnp.bfloat16
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 128)), jnp.float32)
CONFIG = moe.configs.DEEPSEEK_V3.scaled_down(num_experts=16)
EINSUM = "bsd,dhk->bshk"

# name: (module by its random numbers, the contracting dimensions of the weights by their names)
NNX = {
    "Linear": (partial(ours.Linear, 128, 64), {"kernel": None}),
    "LinearGeneral": (partial(ours.LinearGeneral, 128, (4, 16)), {"kernel": 0}),
    "Einsum": (partial(ours.Einsum, EINSUM, (128, 4, 16), (4, 16)), {"kernel": 0}),
    "SwiGLU": (partial(ours.SwiGLU, 128, 256), {"w_gate_up": None, "w_down": None}),
    "MoE": (
        partial(ours.MoE, CONFIG),
        dict.fromkeys(("w_gate_up", "w_down", "shared_gate_up", "shared_down")),
    ),
}
LINEN = {
    "Dense": (linen.Dense(64), {"kernel": None}),
    "DenseGeneral": (linen.DenseGeneral((4, 16)), {"kernel": 0}),
    "Einsum": (linen.Einsum((128, 4, 16), EINSUM), {"kernel": 0}),
    "MoE": (
        linen.MoE(CONFIG),
        dict.fromkeys(("w_gate_up", "w_down", "shared_gate_up", "shared_down")),
    ),
}


def quantised(params, contracting, dtype=None):
    of = lambda name, w: quantize_weight(w.astype(dtype or w.dtype), contracting=contracting[name])
    return {name: of(name, w) if name in contracting else w for name, w in params.items()}


def gradients(run, params):
    """The result of run(params), and gradients of the parameters in their dtypes."""

    def total(params):
        out = run(params)
        return out.astype(jnp.float32).sum(), out

    grads, out = jax.jit(jax.grad(total, has_aux=True))(params)
    return out, master_weights(grads)


def assert_same(name, found, expected):
    """The same bits. Of MoE, XLA on a CPU may round the f32 sum of a token's experts elsewhere."""

    def check(x, y):
        if name == "MoE":
            assert reference.calc_diff(x, y) < 1e-12
        else:
            reference.assert_same_bits(x.astype(y.dtype), y)

    jax.tree.map(check, found, expected)


def nnx_problem(name, **how):
    module, contracting = NNX[name]
    module = module(rngs=nnx.Rngs(0), **how)
    if name == "MoE":
        assert set(contracting) < set(moe.block.parameter_shapes(CONFIG))
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    run = lambda params: nnx.merge(graph, nnx.State(params), rest)(X)
    return run, nnx.to_pure_dict(params), contracting


@pytest.mark.parametrize("name", NNX)
def test_nnx(name):
    run, params, contracting = nnx_problem(name)
    found = gradients(run, quantised(params, contracting))
    assert_same(name, found, gradients(run, params))


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral", "Einsum"])
def test_nnx_modules_that_compute_in_bf16(name):
    """They cast the kernel before it is quantised, so a pair of the cast has their bits."""
    run, params, contracting = nnx_problem(name, dtype=jnp.bfloat16)
    found = gradients(run, quantised(params, contracting, jnp.bfloat16))
    assert found[1]["kernel"].dtype == jnp.bfloat16
    assert_same(name, found, gradients(run, params))
    # One of the f32 kernel has the dtypes of such a module too.
    of_f32 = quantised(params, contracting)
    out = jax.eval_shape(run, of_f32)
    assert out.dtype == jnp.bfloat16
    assert gradients(run, of_f32)[1]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("name", NNX)
def test_quantize_weights_of_a_module(name, dtype):
    run, params, contracting = nnx_problem(name, dtype=dtype)
    module = NNX[name][0](rngs=nnx.Rngs(0), dtype=dtype)
    ours.quantize_weights(module)
    ours.quantize_weights(module)  # what is quantised stays
    graph, weights, rest = nnx.split(module, nnx.Param, ...)
    weights = nnx.to_pure_dict(weights)
    is_pair = {name for name, w in weights.items() if isinstance(w, QuantizedWeight)}
    assert is_pair == set(contracting)
    run_once = lambda weights: nnx.merge(graph, nnx.State(weights), rest)(X)
    assert_same(name, gradients(run_once, weights), gradients(run, params))


def stack_of(name, **how):
    """Three modules, stacked as a user does for nnx.scan, and their results for X by a scan."""
    make = nnx.vmap(lambda rngs: NNX[name][0](rngs=rngs, **how), in_axes=(0,), out_axes=0)
    each = nnx.scan(lambda module, x: module(x), in_axes=(0, None), out_axes=0)
    return nnx.split_rngs(splits=3)(make)(nnx.Rngs(0)), lambda module: each(module, X)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("name", NNX)
def test_quantize_weights_of_a_stack_of_modules(name, dtype):
    stack, run = stack_of(name, dtype=dtype)
    plain = nnx.split(stack, nnx.Param, ...)
    ours.quantize_weights(stack)
    once = nnx.split(stack, nnx.Param, ...)

    def of(graph, *states):
        params, rest = map(nnx.to_pure_dict, states)
        return gradients(lambda p: run(nnx.merge(graph, nnx.State(p), nnx.State(rest))), params)

    assert all(isinstance(getattr(stack, w)[...], QuantizedWeight) for w in NNX[name][1])
    assert_same(name, of(*once), of(*plain))


@pytest.mark.parametrize("name", ["Linear", "SwiGLU", "MoE"])
def test_weights_for_inference_of_a_stack_of_modules(name):
    stack, run = stack_of(name)
    expected = run(stack)
    ours.quantize_weights(stack, for_inference=True)
    assert_same(name, run(stack), expected)
    assert all(isinstance(getattr(stack, w)[...], ScaledArray) for w in NNX[name][1])


def test_quantize_weights_of_a_model():
    """By the recipe of each module; a module of Flax stays as it is."""
    rngs = nnx.Rngs(0)
    head = nnx.Linear(64, 32, rngs=rngs)
    layers = [
        ours.Linear(128, 128, recipe=Recipe(pow2_scale=True), rngs=rngs),
        ours.LinearGeneral((8, 16), 64, axis=(-2, -1), rngs=rngs),
    ]
    model = nnx.Sequential(layers[0], lambda x: x.reshape(*x.shape[:-1], 8, 16), layers[1], head)
    expected = model(X)
    ours.quantize_weights(model)
    reference.assert_same_bits(model(X), expected)
    assert [type(layer.kernel[...]) is QuantizedWeight for layer in (*layers, head)] == [1, 1, 0]
    assert layers[0].kernel[...].recipe.pow2_scale


@pytest.mark.parametrize("name", ["Linear", "SwiGLU", "MoE"])
def test_weights_for_inference(name):
    """One byte a weight, the same results, and the same gradients of x."""
    module = NNX[name][0](rngs=nnx.Rngs(0))
    run = lambda module: module(X)
    gradient = lambda module: jax.grad(lambda x: module(x).sum())(X)
    expected = run(module), gradient(module)
    ours.quantize_weights(module, for_inference=True)
    ours.quantize_weights(module, for_inference=True)  # what is quantised stays
    assert_same(name, (run(module), gradient(module)), expected)
    for weight in NNX[name][1]:
        stored = getattr(module, weight)[...]
        assert isinstance(stored, ScaledArray) and stored.values is None
        size = stored.transposed.size
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) < 1.01 * size + 1024
    loss = lambda params, graph, rest: nnx.merge(graph, params, rest)(X).sum()
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs|no gradient"):
        jax.grad(loss)(params, graph, rest)


class _Stack(nn.Module):
    """Three layers, in a scan."""

    @nn.compact
    def __call__(self, x):
        step = lambda layer, x, _: (layer(x), None)
        scan = nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(linen.Dense(128, name="layer"), x, None)[0]


@pytest.mark.parametrize("with_transpose", [False, True])
@pytest.mark.parametrize(
    "module",
    [linen.Dense(64), linen.DenseGeneral(64, use_bias=False), linen.MoE(CONFIG), _Stack()],
    ids=["Dense", "DenseGeneral", "MoE", "scan"],
)
def test_scaled_arrays_in_linen(module, with_transpose):
    """The values are stored, whose shape Flax compares with that of the parameter."""
    variables = module.init(jax.random.key(0), X)
    quantise = partial(quantize, block=(128, 128))
    names = {"kernel", "w_gate_up", "w_down", "shared_gate_up", "shared_down"}

    def of(**how):
        put = lambda path, w: quantise(w, **how) if path[-1].key in names else w
        return {**variables, "params": jax.tree.map_with_path(put, variables["params"])}

    run = jax.jit(module.apply)
    reference.assert_same_bits(run(of(with_transpose=with_transpose), X), run(variables, X))
    with pytest.raises(ScopeParamShapeError):
        run(of(with_transpose="only"), X)


def test_weights_for_inference_of_a_model():
    """By the recipe of each module. What its products read in no matrix, or not in FP8, stays."""
    rngs = nnx.Rngs(0)
    layers = [
        ours.Linear(128, 128, recipe=Recipe(fwd="e5m2", pow2_scale=True), dtype=bf16, rngs=rngs),
        ours.LinearGeneral(128, 128, dtype=bf16, rngs=rngs),
        ours.LinearGeneral(128, (8, 16), dtype=bf16, rngs=rngs),
        ours.LinearGeneral((8, 16), 128, axis=(-2, -1), dtype=bf16, rngs=rngs),
        ours.Einsum("bsd,df->bsf", (128, 64), dtype=bf16, rngs=rngs),
        ours.Linear(64, 64, recipe="bf16", dtype=bf16, rngs=rngs),
        nnx.Linear(64, 32, dtype=bf16, rngs=rngs),
    ]
    model = nnx.Sequential(*layers)
    ours.quantize_weights(layers[1])
    expected = model(X)
    ours.quantize_weights(model, for_inference=True)
    reference.assert_same_bits(model(X), expected)
    found = [layer.kernel[...] for layer in layers]
    assert [isinstance(w, ScaledArray) for w in found] == [1, 1, 0, 0, 0, 0, 0]
    assert found[0].dtype == jnp.float8_e5m2


class _Tied(nnx.Module):
    """Modules that hold one kernel, and one whose kernel is normalised in each call."""

    def __init__(self, rngs):
        linear = partial(ours.Linear, use_bias=False, rngs=rngs)
        self.embed = nnx.Embed(64, 128, rngs=rngs)
        self.of_embed = linear(64, 128)
        self.of_embed.kernel = self.embed.embedding
        self.einsum = ours.Einsum("td,df->tf", (128, 128), rngs=rngs)
        self.of_einsum, self.first, self.second = (linear(128, 128) for _ in range(3))
        self.of_einsum.kernel, self.second.kernel = self.einsum.kernel, self.first.kernel
        self.normed = nnx.WeightNorm(linear(128, 128), rngs=rngs)

    def __call__(self, x):
        x = self.of_embed(x) + self.embed(jnp.arange(len(x)))
        return self.normed(self.second(self.first(self.of_einsum(self.einsum(x)))))


@pytest.mark.parametrize("for_inference", [False, True])
def test_a_kernel_that_another_module_reads_unquantised_stays(for_inference):
    model, x = _Tied(nnx.Rngs(0)), X[0, :, :64]
    expected = model(x)
    ours.quantize_weights(model, for_inference=for_inference)
    reference.assert_same_bits(model(x), expected)
    quantised = ScaledArray if for_inference else QuantizedWeight
    assert isinstance(model.first.kernel[...], quantised)
    assert isinstance(model.einsum.kernel[...], jax.Array if for_inference else QuantizedWeight)
    for module in (model.of_embed, model.normed.layer_instance):
        assert isinstance(module.kernel[...], jax.Array)


def test_weights_that_are_gone_are_named_by_their_path():
    """A model for inference cannot train; nothing of it changes."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(ours.Linear(128, 64, rngs=rngs), ours.SwiGLU(64, 128, rngs=rngs))
    ours.quantize_weights(model.layers[1], for_inference=True)
    message = r"{} must be an array or .*; got a ScaledArray f8e4m3fn\[64,256\], .*\. Load the unq"
    for module, path in ((model, "layers/1/w_gate_up"), (model.layers[1], "w_gate_up")):
        with raises(TypeError, match=f"^quantize_weights: {message.format(path)}"):
            ours.quantize_weights(module)
    assert not isinstance(model.layers[0].kernel[...], QuantizedWeight)


@pytest.mark.parametrize("for_inference", [False, True])
def test_a_model_without_modules_of_ours_gets_a_warning(for_inference):
    """It names Flax's module; one that stays for another reason gets none."""
    model = nnx.Sequential(nnx.Linear(128, 64, dot_general=dot_general, rngs=nnx.Rngs(0)))
    message = "^quantize_weights: model must hold modules of jax_fp8gemm.nnx; got flax.*.Sequential"
    with pytest.warns(UserWarning, match=f"{message} .* use jax_fp8gemm.nnx.Linear.$") as found:
        ours.quantize_weights(model, for_inference=for_inference)
    assert [warning.filename for warning in found] == [__file__]
    assert isinstance(model.layers[0].kernel[...], jax.Array)
    transposed = ours.Einsum("bsd,df->fbs", (128, 64), rngs=nnx.Rngs(0))
    ours.quantize_weights(transposed, for_inference=for_inference)  # warnings are errors here


@pytest.mark.parametrize(
    ("equation", "shape", "is_quantised"),
    [
        ("bsnh,nhd->bsd", (4, 16, 64), True),  # jnp.einsum contracts h, then n
        ("bsd,df->fbs", (128, 64), False),  # jnp.einsum multiplies the kernel by x
        ("...d,df->...f", (128, 64), True),
        ("gbd,gdf->gbf", (2, 128, 64), True),
        ("gbd,dgf->gbf", (128, 2, 64), False),
    ],
)
def test_quantize_weights_of_an_einsum(equation, shape, is_quantised):
    module = ours.Einsum(equation, shape, rngs=nnx.Rngs(0))
    x = {3: X, 4: X.reshape(2, 8, 4, 32)[..., :16]}[4 if shape[0] == 4 else 3]
    expected = module(x)
    ours.quantize_weights(module)
    assert isinstance(module.kernel[...], QuantizedWeight) == is_quantised
    reference.assert_same_bits(module(x), expected)


@pytest.mark.parametrize("name", LINEN)
def test_linen(name):
    module, contracting = LINEN[name]
    variables = module.init(jax.random.key(0), X)
    rest = {kind: values for kind, values in variables.items() if kind != "params"}
    run = lambda params: module.apply({"params": params, **rest}, X)
    found = gradients(run, quantised(variables["params"], contracting))
    assert_same(name, found, gradients(run, variables["params"]))


def test_a_kernel_set_in_place():
    module = ours.Linear(128, 64, rngs=nnx.Rngs(0))
    expected = module(X)
    module.kernel.set_value(quantize_weight(module.kernel[...]))
    reference.assert_same_bits(module(X), expected)
