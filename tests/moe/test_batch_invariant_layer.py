"""The sums of a batch-invariant layer against their bits in NumPy; the layer in many batches."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from errors import raises

import jax_fp8gemm as jf
from jax_fp8gemm import moe

RECIPE = jf.Recipe(batch_invariant=True)
M, D, TOP_K = 24, 300, 3
DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float16))


def rounded(x, dtype):
    """f32 x in a dtype. In f16, subnormal numbers become zeros."""
    x = x.astype(dtype)
    return np.where(np.abs(x) < 2.0**-14, x * 0, x) if dtype == "f2" else x


def pieces(x):
    """f32 numbers whose sum is x: an f32 is cut to 12 bits, and the rest has 12 too."""
    if x.dtype != np.float32:
        return [x.astype(np.float32)]
    first = (x.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)
    return [first, x - first]


def model_sums(rows, order, weights):
    total = None
    for column, weight in zip(order.T, weights.T, strict=True):
        for x in pieces(rows[column]):
            for w in pieces(weight):
                term = x * w[:, None]
                total = term if total is None else total + term
    return rounded(total, rows.dtype)


def model_dots(rows, order, dout):
    padding = [(0, 0)] * 2 + [(0, -D % 128)]
    blocks = lambda x: np.pad(x, padding).reshape(*x.shape[:2], -1, 128)
    x, y = ([blocks(p) for p in pieces(z)] for z in (rows[order], dout[:, None]))
    total = np.zeros((*order.shape, 128), np.float32)
    for i in range(-(-D // 128)):
        for a in x:
            for b in y:
                total = total + a[:, :, i] * b[:, :, i]
    while total.shape[-1] > 1:
        total = total[..., : total.shape[-1] // 2] + total[..., total.shape[-1] // 2 :]
    return total[..., 0]


def _draw(rng, shape, dtype):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpermute_and_its_gradients(dtype):
    rng = np.random.default_rng(0)
    order = rng.permutation(M * TOP_K).astype(np.int32).reshape(M, TOP_K)
    rows, dout = _draw(rng, (M * TOP_K, D), dtype), _draw(rng, (M, D), dtype)
    weights = rng.uniform(0, 1, (M, TOP_K)).astype(np.float32)

    factor = np.asarray(0.7, dtype)

    def step(rows, weights, dout, factor):
        """Operands are products, and results go into sums, which XLA may fuse."""
        run = lambda rows, weights: moe.unpermute(rows, order, weights, batch_invariant=True)
        out, vjp = jax.vjp(run, rows * factor, weights * factor.astype(jnp.float32))
        return out, *vjp(dout * factor), out.astype(jnp.float32) * 3 + 1

    out, drows, dweights, after = jax.jit(step)(rows, weights, dout, factor)
    rows, dout = rounded(rows * factor, dtype), rounded(dout * factor, dtype)
    weights = weights * factor.astype(np.float32)
    expected = model_sums(rows, order, weights)
    reference.assert_same_bits(out, expected)
    row = np.argsort(order.ravel())
    of_rows = dout.astype(np.float32)[row // TOP_K] * weights.ravel()[row][:, None]
    reference.assert_same_bits(drows, rounded(of_rows, dtype))
    reference.assert_same_bits(dweights, model_dots(rows, order, dout))
    # What follows sees the rounded result. Two roundings of f32 are left to XLA.
    np.testing.assert_allclose(after, expected.astype(np.float32) * 3 + 1, rtol=2e-7, atol=2e-7)


NUM_EXPERTS, F = 4, 128


def step(recipe, x, logits, w_gate_up, w_down, dout, implementation="emulate"):
    how = dict(top_k=2, scoring="sigmoid", recipe=recipe, implementation=implementation)
    run = lambda x, logits: moe.moe_layer(x, logits, w_gate_up, w_down, **how)
    out, vjp = jax.vjp(run, x, logits)
    return out, *vjp(dout)


def layer_operands(m, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) * shape[-2] ** -0.5)
    bf16 = lambda x: x.astype(jnp.bfloat16)
    weights = bf16(normal(NUM_EXPERTS, 128, 2 * F)), bf16(normal(NUM_EXPERTS, F, 128))
    x, dout = (bf16(jnp.asarray(rng.standard_normal((m, 128)))) for _ in range(2))
    logits = jnp.asarray(rng.standard_normal((m, NUM_EXPERTS)), jnp.float32)
    return x, logits, *weights, dout


# Elsewhere in a batch, with other tokens beside them. Another m would be compiled for half a
# minute more; tests of the parts, and those on a GPU, have it.
PLACES = np.asarray([3, 16, 0, 8])


def elsewhere(x, seed):
    """An array like x with its first four rows at PLACES, among others."""
    other = np.random.default_rng(seed).permutation(np.asarray(x))
    other[PLACES] = np.asarray(x)[:4]
    return jnp.asarray(other)


def test_a_layer_has_the_same_bits_in_any_batch():
    """Of a token: its result, and the gradients of x and of the logits."""
    run = jax.jit(partial(step, RECIPE))
    x, logits, *weights, dout = layer_operands(17)
    expected = run(x, logits, *weights, dout)
    moved = [elsewhere(a, seed) for seed, a in enumerate((x, logits, dout))]
    found = run(*moved[:2], *weights, moved[2])
    for y, z in zip(found, expected, strict=True):
        reference.assert_same_bits(y[PLACES], z[:4])


@pytest.mark.parametrize("recipe", [dict(wgrad="bf16"), dict(fwd=None)], ids=str)
def test_recipes_whose_experts_it_does_not_cover(recipe):
    operands = layer_operands(4)[:4]
    with raises(NotImplementedError, match="moe_layer: batch_invariant must go with an FP8 fwd"):
        moe.moe_layer(*operands, top_k=2, recipe=jf.Recipe(batch_invariant=True, **recipe))


def test_a_block_has_the_same_bits_in_any_batch():
    """With the router's product, groups of experts and a shared expert."""
    config = moe.configs.DEEPSEEK_V3.scaled_down(num_experts=16)
    key = jax.random.key(0)
    kernel = jax.nn.initializers.lecun_normal()
    parameters = {
        name: moe.block.initial_parameter(key, name, shape, jnp.bfloat16, kernel)
        for name, shape in moe.block.parameter_shapes(config).items()
    }
    how = dict(recipe=RECIPE, implementation="emulate")
    run = partial(jax.jit(partial(moe.block.apply_block, config, **how)), parameters)
    x = jax.random.normal(key, (17, config.hidden), jnp.bfloat16)
    reference.assert_same_bits(run(elsewhere(x, 0))[PLACES], run(x)[:4])


@pytest.mark.parametrize("name", ["DEEPSEEK_V3", "LLAMA_4_MAVERICK"])
def test_gradients_of_a_block_are_those_without_invariance(name):
    """Of all parameters and of x, through a shared expert and through weighed tokens."""
    config = getattr(moe.configs, name).scaled_down(num_experts=16)
    kernel = jax.nn.initializers.lecun_normal()
    key = jax.random.key(0)
    parameters = {
        name: moe.block.initial_parameter(key, name, shape, jnp.float32, kernel)
        for name, shape in moe.block.parameter_shapes(config).items()
    }
    x = jax.random.normal(key, (8, config.hidden))
    loss = lambda recipe, *of: (moe.block.apply_block(config, *of, recipe=recipe) ** 2).sum()
    gradients = lambda recipe: jax.jit(jax.grad(partial(loss, recipe), (0, 1)))(parameters, x)
    # f32 sums in another order may round another FP8 value.
    compare = lambda x, y: reference.calc_diff(x, y) if np.any(y) else np.abs(x).max()
    diffs = jax.tree.map(compare, gradients(RECIPE), gradients(jf.DEEPSEEK_V3))
    assert max(jax.tree.leaves(diffs)) < 1e-3


def test_gradients_of_logits_in_bf16():
    x, logits, *weights, dout = layer_operands(8)
    operands = x, logits.astype(jnp.bfloat16), *weights, dout
    found, expected = (
        jax.jit(partial(step, recipe, implementation="xla"))(*operands)[2]
        for recipe in (RECIPE, jf.DEEPSEEK_V3)
    )
    assert found.dtype == jnp.bfloat16
    assert reference.calc_diff(found, expected) < 1e-3


def test_what_unpermute_does_not_take():
    operands = jnp.ones((4, 8)), jnp.asarray([[0, 1], [2, 3]]), jnp.ones((2, 2))
    with raises(TypeError, match="unpermute: batch_invariant must be True or False; got 1"):
        moe.unpermute(*operands, batch_invariant=1)
    run = lambda rows: moe.unpermute(rows, *operands[1:], batch_invariant=True).sum()
    with raises(NotImplementedError, match="unpermute: is differentiable once"):
        jax.grad(lambda w: jax.grad(lambda r: run(r * w) ** 2)(operands[0]).sum())(1.0)


@pytest.mark.parametrize("tokens, d", [(0, 16), (3, 0), (0, 0)])
def test_gradients_of_nothing(tokens, d):
    """Without tokens or features gradients are empty or zero."""
    zeros, how = jnp.zeros, dict(top_k=2, recipe=RECIPE)
    run = lambda x, *weights: moe.moe_layer(x, zeros((tokens, 4)), *weights, **how)
    loss = lambda *operands: run(*operands).sum()
    operands = zeros((tokens, d)), zeros((4, d, 32)), zeros((4, 16, d))
    for found, x in zip(jax.grad(loss, argnums=(0, 1, 2))(*operands), operands, strict=True):
        assert found.shape == x.shape and not np.any(found)
