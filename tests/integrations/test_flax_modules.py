"""jax_fp8gemm.nnx and jax_fp8gemm.linen beside Flax's own modules."""

import gated_activations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises
from flax import linen as nn
from flax import nnx

from jax_fp8gemm import BF16, HYBRID, linen, moe
from jax_fp8gemm import nnx as ours

X = np.random.default_rng(0).standard_normal((2, 8, 128)).astype(np.float32)
CONFIG = moe.configs.DEEPSEEK_V3.scaled_down(num_experts=16)

NNX = {
    "Linear": ((128, 64), {}, {}),
    "LinearGeneral": (((128,), (4, 16)), {}, {}),
    "Einsum": (("bsd,dhk->bshk", (128, 4, 16), (4, 16)), {}, {}),
}
LINEN = {
    "Dense": dict(features=64),
    "DenseGeneral": dict(features=(4, 16)),
    "Einsum": dict(shape=(128, 4, 16), einsum_str="bsd,dhk->bshk"),
}


def _num_gemms(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("jax_fp8gemm_gemm[")


@pytest.mark.parametrize("name", NNX)
def test_nnx_modules_are_flax_ones_with_an_fp8_product(name):
    args, _, _ = NNX[name]
    theirs, module = getattr(nnx, name)(*args, rngs=nnx.Rngs(0)), getattr(ours, name)(
        *args, rngs=nnx.Rngs(0)
    )  # fmt: skip
    assert isinstance(module, getattr(nnx, name))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module), nnx.state(theirs))
    nnx.update(theirs, nnx.state(module))  # a state of one is a state of the other
    assert _num_gemms(module, X) == 1
    assert 1e-5 < reference.calc_diff(module(X), np.asarray(theirs(X), np.float64)) < 2e-3
    plain = getattr(ours, name)(*args, recipe=BF16, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(plain(X), theirs(X))


@pytest.mark.parametrize("name", LINEN)
def test_linen_modules_are_flax_ones_with_an_fp8_product(name):
    theirs, module = getattr(nn, name)(**LINEN[name]), getattr(linen, name)(**LINEN[name])
    variables = module.init(jax.random.key(0), X)
    expected = theirs.init(jax.random.key(0), X)
    jax.tree.map(np.testing.assert_array_equal, variables, expected)
    assert _num_gemms(module.apply, variables, X) == 1
    truth = np.asarray(theirs.apply(expected, X), np.float64)
    assert 1e-5 < reference.calc_diff(module.apply(variables, X), truth) < 2e-3
    plain = module.clone(recipe=BF16).apply(variables, X)
    np.testing.assert_array_equal(plain, theirs.apply(expected, X))


def test_modules_keep_their_names_in_a_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linen.Dense(8)(nn.LayerNorm()(linen.Dense(16)(x)))

    params = Model().init(jax.random.key(0), X)["params"]
    assert set(params) == {"Dense_0", "LayerNorm_0", "Dense_1"}


def test_modules_of_one_recipe_share_a_compiled_function():
    layers = [ours.Linear(128, 64, recipe=HYBRID, rngs=nnx.Rngs(i)) for i in (0, 1)]
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])


def test_swiglu_is_that_of_float64():
    layer = ours.SwiGLU(128, 256, rngs=nnx.Rngs(0))
    w_gate_up, w_down = (np.asarray(w[...], np.float64) for w in (layer.w_gate_up, layer.w_down))
    gate, up = np.split(X.astype(np.float64) @ w_gate_up, 2, axis=-1)
    expected = gated_activations.gated(gate, up, "silu") @ w_down
    assert 1e-4 < reference.calc_diff(layer(jnp.asarray(X)), expected) < 4e-3


def test_nnx_moe_is_the_block_of_its_parameters():
    layer = ours.MoE(CONFIG, rngs=nnx.Rngs(0))
    parameters = {name: getattr(layer, name)[...] for name in moe.block.parameter_shapes(CONFIG)}
    x = jnp.asarray(X)
    expected, load = jax.jit(
        lambda p, x: moe.block.apply_block(CONFIG, p, x, return_load=True)
    )(parameters, x)  # fmt: skip
    out, found = nnx.jit(lambda layer, x: layer(x, return_load=True))(layer, x)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(found, load)
    assert found.sum() == 16 * CONFIG.top_k


def test_no_gradient_trains_the_balance_bias():
    layer = ours.MoE(CONFIG, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    loss = lambda layer, x: jnp.square(layer(x)).astype(jnp.float32).mean()
    grads = nnx.jit(nnx.grad(loss))(layer, jnp.asarray(X, jnp.bfloat16))
    names = {path[0] for path, _ in nnx.to_flat_state(nnx.state(grads))}
    assert names == set(moe.block.parameter_shapes(CONFIG)) - {"balance_bias"}
    for path, grad in nnx.to_flat_state(nnx.state(grads)):
        assert np.asarray(grad[...], np.float32).any(), path
    layer.balance_bias[...] = moe.update_balance_bias(
        layer.balance_bias[...], jnp.arange(16, dtype=jnp.int32), 0.5
    )
    assert layer.balance_bias[...].tolist() == [0.5] * 8 + [-0.5] * 8


def test_linen_moe_is_the_block_of_its_parameters():
    layer, x = linen.MoE(CONFIG), jnp.asarray(X)
    variables = layer.init(jax.random.key(0), x)
    parameters = {**variables["params"], **variables["balance"]}
    assert jax.tree.map(jnp.shape, parameters) == moe.block.parameter_shapes(CONFIG)
    expected = jax.jit(lambda p, x: moe.block.apply_block(CONFIG, p, x))(parameters, x)
    np.testing.assert_array_equal(jax.jit(layer.apply)(variables, x), expected)


def test_parameters_carry_mesh_axes():
    axes = ("expert", None, None)
    layer = nnx.eval_shape(
        lambda: ours.MoE(CONFIG, metadata={"w_down": {"mesh_axes": axes}}, rngs=nnx.Rngs(0))
    )
    assert layer.w_down.get_metadata("mesh_axes") == axes
    boxed = jax.eval_shape(
        linen.MoE(CONFIG, axes={"w_down": axes}).init, jax.random.key(0), jnp.asarray(X)
    )
    assert boxed["params"]["w_down"].names == axes


def test_names_that_are_no_parameters_are_refused():
    with pytest.raises(ValueError, match=r"metadata must name parameters of .*; got \['w_up'\]"):
        ours.MoE(CONFIG, metadata={"w_up": {}}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"axes must name parameters of .*; got \['w_up'\]"):
        linen.MoE(CONFIG, axes={"w_up": ()}).init(jax.random.key(0), jnp.asarray(X))


def test_wrong_options_of_nnx_are_refused_when_the_module_is_made():
    with raises(TypeError, match=r"^MoE: options must be of .*'mesh'\]; got \['expert'\]"):
        ours.MoE(CONFIG, expert="x", rngs=nnx.Rngs(0))
    with raises(
        TypeError, match=r"^MoE: options must be of .*\['top_k'\]\. The config has sizes, "
    ):
        ours.MoE(CONFIG, top_k=3, rngs=nnx.Rngs(0))
    for recipe in (["hybrid"], "e4m3"):
        with raises(TypeError, match="^dot_general: recipe must be a jax_fp8gemm.Recipe, "):
            ours.Linear(8, 8, recipe=recipe, rngs=nnx.Rngs(0))
    with raises(ValueError, match="^einsum: implementation must be"):
        ours.Einsum("ab,bc->ac", (2, 3), implementation="gpu", rngs=nnx.Rngs(0))


# Each of these of SwiGLU, of nnx.MoE and of linen.MoE.
WRONG = [
    (dict(recipe="e4m3"), TypeError, "recipe must be a jax_fp8gemm.Recipe,"),
    (dict(implementation="gpu"), ValueError, "implementation must be None, 'cuda'"),
    (dict(dtype=jnp.int32), TypeError, "dtype must be bf16, f16 or f32; got s32"),
    (dict(param_dtype=jnp.int8), TypeError, "param_dtype must be bf16, f16 or f32; got s8"),
]


@pytest.mark.parametrize("kwargs, error, message", WRONG)
def test_wrong_arguments_are_refused_when_a_module_is_made(kwargs, error, message):
    with raises(error, match=f"^SwiGLU: {message}"):
        ours.SwiGLU(8, 8, **kwargs, rngs=nnx.Rngs(0))
    with raises(error, match=f"^MoE: {message}"):
        ours.MoE(CONFIG, **kwargs, rngs=nnx.Rngs(0))
    options = {n: x for n, x in kwargs.items() if "dtype" not in n}
    layer = linen.MoE(CONFIG, options=options, **{n: kwargs[n] for n in set(kwargs) - set(options)})
    with raises(error, match=f"^MoE: {message}"):
        layer.init(jax.random.key(0), jnp.asarray(X))


def test_a_name_of_flax_is_told_from_one_of_ours():
    with pytest.raises(AttributeError, match="no attribute 'vmap'. It is one of Flax: flax.nnx.vm"):
        ours.vmap  # noqa: B018
    with pytest.raises(AttributeError, match="'Module'. It is one of Flax: flax.linen.Module$"):
        linen.Module  # noqa: B018
    with pytest.raises(AttributeError, match="'jax_fp8gemm.nnx' has no attribute 'SwiGlu'$"):
        ours.SwiGlu  # noqa: B018


def test_a_wrong_activation_is_refused_when_swiglu_is_made():
    with raises(ValueError, match="^SwiGLU: activation must be 'silu', .*; got 'swish'"):
        ours.SwiGLU(8, 8, activation="swish", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_tokens_that_are_no_array_are_refused(dtype):
    tokens = X.tolist()
    with raises(TypeError, match="^gated_mlp: x must be an array; got list"):
        ours.SwiGLU(128, 128, dtype=dtype, rngs=nnx.Rngs(0))(tokens)
    with raises(TypeError, match="^moe.block: x must be an array; got list"):
        ours.MoE(CONFIG, dtype=dtype, rngs=nnx.Rngs(0))(tokens)
    with raises(TypeError, match="^moe.block: x must be an array; got list"):
        linen.MoE(CONFIG, dtype=dtype).init(jax.random.key(0), tokens)


def test_wrong_options_of_linen_are_refused():
    layer = linen.MoE(CONFIG, options={"top_k": 3})
    with raises(TypeError, match=r"^MoE: options must be of .*'mesh'\]; got \['top_k'\]\. The"):
        layer.init(jax.random.key(0), jnp.asarray(X))
    with raises(TypeError, match=r"^moe.block: options must be of .*; got \['top_k'\]\. The"):
        moe.block.apply_block(CONFIG, {}, jnp.asarray(X), top_k=3)


@pytest.mark.parametrize(
    "name, argument",
    [
        ("Linear", "dot_general"),
        ("LinearGeneral", "dot_general"),
        ("LinearGeneral", "dot_general_cls"),
    ],
)
def test_another_product_is_refused_by_nnx(name, argument):
    module = getattr(ours, name)
    with raises(TypeError, match=f"^{name}: {argument} must be left out, .* Use flax.nnx"):
        module(128, 128, rngs=nnx.Rngs(0), **{argument: jax.lax.dot_general})
    module(128, 128, rngs=nnx.Rngs(0), **{argument: None})


def test_einsum_needs_two_operands_and_a_result():
    with pytest.raises(ValueError, match="must have two operands and an explicit result; got 'ab'"):
        linen.Einsum(shape=(2, 2), einsum_str="ab").init(jax.random.key(0), X)
