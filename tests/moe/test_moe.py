"""moe_layer against all experts of all tokens in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, REORDERED
from errors import raises, without_annotation_checks

import jax_fp8gemm
from jax_fp8gemm import BF16, DEEPSEEK_V3, quantize
from jax_fp8gemm.moe import moe_layer, moe_mlp, permute, route, unpermute

M, E, TOP_K, D, F = 40, 6, 2, 128, 48  # d : f of Qwen3-30B-A3B
recipes = pytest.mark.parametrize("recipe", [BF16, DEEPSEEK_V3], ids=["bf16", "fp8"])


@functools.cache
def random(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def problem():
    """x (m, d), logits (m, e), w_gate_up (e, d, 2 f), w_down (e, f, d)."""
    weights = random(E, D, 2 * F, seed=2, scale=D**-0.5), random(E, F, D, seed=3, scale=F**-0.5)
    return random(M, D), random(M, E, seed=1), *weights


def expert(x, w_gate_up, w_down):
    gate, up = jnp.split(x @ w_gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ w_down


def dense(x, logits, w_gate_up, w_down, top_k):
    """All experts of all tokens, of which top_k have a weight; in the precision of x."""
    outs = jnp.stack([expert(x, w_gate_up[i], w_down[i]) for i in range(E)], axis=1)
    threshold = jnp.sort(logits, axis=1)[:, -top_k][:, None]
    probs = jax.nn.softmax(jnp.where(logits >= threshold, logits, -jnp.inf))
    return (outs * probs[:, :, None]).sum(axis=1)


def vjp(function, operands, dout):
    out, pullback = jax.vjp(function, *operands)
    return out, *pullback(dout)


LOGITS = {
    "random": np.asarray(problem()[1]),
    "one expert takes all": np.asarray(problem()[1]) * 0.1 + np.eye(E)[2] * 5,
    "empty experts": np.asarray(problem()[1]) - 100 * np.arange(E) % 200,
}


@functools.cache
def jitted(recipe, top_k):
    layer = functools.partial(moe_layer, top_k=top_k, recipe=recipe)
    return jax.jit(functools.partial(vjp, layer))


@functools.cache
def jitted_truth(top_k):
    return jax.jit(functools.partial(vjp, functools.partial(dense, top_k=top_k)))


@pytest.mark.parametrize(
    "recipe, logits, top_k",
    [
        *((recipe, logits, TOP_K) for recipe in LAYER for logits in LOGITS),
        # Routing alone, so without FP8.
        (BF16, "random", 1),
        (BF16, "random", E),
    ],
)
def test_result_and_gradients_are_those_of_the_dense_layer(recipe, logits, top_k):
    x, _, *weights = problem()
    operands, dout = (x, jnp.asarray(LOGITS[logits], jnp.float32), *weights), random(M, D, seed=5)
    found = jitted(recipe, top_k)(operands, dout)
    with jax.enable_x64(True):
        exact = [jnp.asarray(operand, jnp.float64) for operand in (*operands, dout)]
        expected = jitted_truth(top_k)(exact[:4], exact[4])
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        if top_k == 1 and i == 2:  # a weight of 1 whatever the logit
            np.testing.assert_array_equal(x, 0)
        else:
            assert reference.calc_diff(x, y) < LAYER[recipe]


def test_the_layer_is_its_three_parts():
    """The same values are quantised: for f32 operands also the cotangents of the rows."""
    x, logits, *experts = problem()
    indices, weights = route(logits, TOP_K)
    indices = indices.at[3].set(-1).at[5, 1].set(E)  # no experts

    def in_parts(x, weights, *experts):
        rows, group_sizes, order = permute(x, indices, E)
        return unpermute(moe_mlp(rows, *experts, group_sizes), order, weights)

    whole = lambda x, weights, *experts: moe_layer(x, (indices, weights), *experts)
    run = lambda f: jax.jit(functools.partial(vjp, f))((x, weights, *experts), random(M, D, seed=5))
    (out, *found), (expected_out, *expected) = run(whole), run(in_parts)
    reference.assert_same_bits(out, expected_out)
    for a, b in zip(found, expected, strict=True):
        # XLA fuses the products of cotangents and weights otherwise: last bits of what is rounded.
        assert reference.calc_diff(a, b) < REORDERED


@recipes
def test_runs_are_bitwise_equal(recipe):
    operands, dout = problem(), random(M, D, seed=5)
    first, second = (jitted(recipe, TOP_K)(operands, dout) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        reference.assert_same_bits(x, y)


def test_permuting_experts_permutes_the_gradients_and_nothing_else():
    operands, dout = problem(), random(M, D, seed=5)
    order = np.array([3, 0, 5, 1, 4, 2])
    x, logits, *weights = operands
    permuted = (x, logits[:, order], *(w[order] for w in weights))
    out, dx, dlogits, *dweights = jitted(BF16, TOP_K)(operands, dout)
    expected = out, dx, dlogits[:, order], *(dw[order] for dw in dweights)
    for found, y in zip(jitted(BF16, TOP_K)(permuted, dout), expected, strict=True):
        np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-5)


def test_permuting_tokens_permutes_the_result():
    x, logits, *weights = problem()
    order = np.random.default_rng(0).permutation(M)
    layer = jax.jit(functools.partial(moe_layer, top_k=TOP_K, recipe=BF16))
    permuted = layer(x[order], logits[order], *weights)
    np.testing.assert_allclose(permuted, layer(x, logits, *weights)[order], rtol=1e-5, atol=1e-5)


def test_a_choice_made_elsewhere_and_no_expert():
    x, logits, *weights = problem()
    indices, probs = route(logits, TOP_K)
    layer = jax.jit(lambda indices: moe_layer(x, (indices, probs), *weights, recipe=BF16))
    out = layer(indices)
    expected, *_ = jitted(BF16, TOP_K)(problem(), random(M, D, seed=5))
    assert reference.calc_diff(out, expected) < 1e-12
    without = layer(indices.at[3].set(-1).at[5, 1].set(E))
    assert not without[3].any()
    first = probs[5, 0] * expert(x[5], *(w[indices[5, 0]] for w in weights))
    np.testing.assert_allclose(without[5], first, rtol=1e-4, atol=1e-5)
    rest = np.setdiff1d(np.arange(M), [3, 5])
    np.testing.assert_allclose(without[rest], out[rest], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capacity_factor", [None, 2.0])
def test_numbers_beyond_int32_are_no_expert(capacity_factor):
    x, logits, *weights = problem()
    indices, probs = route(logits, TOP_K)
    layer = functools.partial(moe_layer, recipe=BF16, capacity_factor=capacity_factor)
    wide = np.asarray(indices, np.int64)
    wide[3] += 2**32
    with without_annotation_checks():
        out = layer(x, (wide, probs), *weights)
    reference.assert_same_bits(out, layer(x, (indices.at[3].set(E), probs), *weights))


def test_options_reach_the_router_and_the_experts():
    x, logits, *weights = problem()
    options = dict(scoring="sigmoid", normalize=False)
    choice = route(logits, TOP_K, **options)
    scaled = [quantize(w, block=(128, 128), with_transpose=True) for w in weights]
    out = moe_layer(x, logits, *scaled, top_k=TOP_K, **options)
    reference.assert_same_bits(out, moe_layer(x, choice, *scaled, top_k=TOP_K))
    assert reference.calc_diff(out, moe_layer(x, choice, *weights)) < 1e-6
    assert reference.calc_diff(out, moe_layer(x, logits, *scaled, top_k=TOP_K)) > 1e-2


@pytest.mark.parametrize("batch", [(2, 4, 5), (8, 5), ()])
def test_leading_dimensions_are_folded(batch):
    x, logits, *weights = problem()
    count = int(np.prod(batch))
    x, logits = x[:count], logits[:count]
    layer = jax.jit(functools.partial(moe_layer, top_k=TOP_K, recipe=BF16))
    out = layer(x.reshape(*batch, D), logits.reshape(*batch, E), *weights)
    assert out.shape == (*batch, D)
    expected = layer(x, logits, *weights)
    np.testing.assert_allclose(out.reshape(-1, D), expected, rtol=1e-5, atol=1e-5)


def test_dtypes_of_the_result_and_the_gradients():
    x, *rest = problem()
    operands = x.astype(jnp.bfloat16), *rest
    shapes = jax.eval_shape(
        lambda *args: vjp(functools.partial(moe_layer, top_k=TOP_K), args, args[0]), *operands
    )
    assert [s.dtype for s in shapes] == [jnp.bfloat16, *(x.dtype for x in operands)]


def test_scan_over_rematerialised_layers():
    x, _, *weights = problem()
    stacked = [jnp.stack([w, w[::-1]]) for w in (random(D, E, scale=D**-0.5), *weights)]

    def layer(x, weights):
        router, *experts = weights
        return x + moe_layer(x, x @ router, *experts, top_k=TOP_K, recipe=BF16), None

    def looped(x, stacked):
        for i in range(2):
            x, _ = layer(x, [w[i] for w in stacked])
        return (x**2).sum()

    scanned = lambda x, stacked: (jax.lax.scan(jax.checkpoint(layer), x, stacked)[0] ** 2).sum()
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(x, stacked) for f in (scanned, looped))
    for y, z in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert reference.calc_diff(y, z) < REORDERED


def test_values_do_not_meet_a_scatter_add():
    layer = functools.partial(moe_layer, top_k=TOP_K)
    text = str(jax.make_jaxpr(functools.partial(vjp, layer))(problem(), random(M, D)))
    # Only the experts' reference adds at indices, inside a primitive that is not lowered here.
    assert "jax_fp8gemm_grouped_wgrad" in text
    assert "scatter-add" not in text and "scatter_add" not in text


# Errors

X, LOGITS2, UP, DOWN = jnp.ones((4, 3)), jnp.ones((4, 5)), jnp.ones((5, 3, 8)), jnp.ones((5, 4, 3))
TOP = jnp.zeros((4, 2), jnp.int32)
BAD_LAYERS = [
    ((X, LOGITS2, UP, DOWN), {}, ValueError, "top_k must be given where router is an array"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=6), ValueError,
     r"top_k must be an integer, 1..num_experts; got 6, logits f32\[4,5\]"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=[2]), ValueError,
     r"top_k must be an integer, .* got \[2\]"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, scoring=["softmax"]), ValueError,
     r"scoring must be 'softmax', 'sigmoid' or 'sqrtsoftplus'; got \['softmax'\]"),
    ((X, LOGITS2[:, 1:], UP, DOWN), dict(top_k=2), ValueError,
     r"router must have one logit for each of the 5 experts of w_gate_up; got router f32\[4,4\]"),
    ((X, LOGITS2[1:], UP, DOWN), dict(top_k=2), ValueError,
     r"router must have the leading dimensions of x; got router f32\[3,5\], x f32\[4,3\]"),
    ((X, (TOP, X[:, :2]), UP, DOWN), dict(top_k=3), ValueError,
     r"top_k must be None or that of indices s32\[4,2\]; got 3"),
    ((X, (TOP[1:], X[:, :2]), UP, DOWN), {}, ValueError, "indices must have the leading dim"),
    ((X, (TOP[:, :0], X[:, :0]), UP, DOWN), {}, ValueError, "at least one expert .*; got top_k 0"),
    ((X, (X, X), UP, DOWN), {}, TypeError, r"indices must be integers; got .* f32\[4,3\]"),
    ((X, (TOP, TOP), UP, DOWN), {}, TypeError, "weights must be "),
    ((X, (TOP, X), UP, DOWN), {}, ValueError,
     r"weights must be one for each of indices s32\[4,2\]; got weights f32\[4,3\]"),
    ((X, (TOP, X, X), UP, DOWN), {}, ValueError, r"logits, or \(indices, .*; got tuple of 3"),
    ((X, [[1.0] * 5] * 4, UP, DOWN), dict(top_k=2), ValueError, "router must .*; got list of 4"),
    ((X, (TOP, None), UP, DOWN), {}, TypeError, "weights must be an array; got NoneType"),
    ((X, (TOP, X[:, :2]), UP[:0], DOWN[:0]), {}, ValueError,
     r"w_down must hold an expert; got f32\[0,4,3\]"),
    ((X, (TOP, X[:, :2]), jnp.ones((1025, 3, 8)), jnp.ones((1025, 4, 3))), {}, ValueError,
     r"a device must hold at most 1024 experts; got 1025, w_gate_up f32\[1025,3,8\]"),
    ((X, LOGITS2, UP[0], DOWN), dict(top_k=2), ValueError, r"w_gate_up must be \(g, d, 2 f"),
    ((X, LOGITS2, [UP], DOWN), dict(top_k=2), TypeError, "w_gate_up must be an array; got list"),
    ((1.0, LOGITS2, UP, DOWN), dict(top_k=2), TypeError, "x must be an array; got float"),
    ((quantize(X), LOGITS2, UP, DOWN), dict(top_k=2), TypeError, "moe_layer quantises x itself: "),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, mesh="foo"), ValueError,
     "exchange, parts and mesh must go with expert_axis; got exchange None, parts 1, mesh 'foo'"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, exchange="all_gather"), ValueError,
     "got exchange 'all_gather', parts 1, mesh None and no expert_axis. Name the mesh axis that "),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, expert_axis="x", mesh="foo"), TypeError,
     "mesh must be a jax.sharding.Mesh; got 'foo'"),
    ((X, (TOP, X[:, :2]), UP, DOWN), dict(scoring="sigmoid"), ValueError,
     r"scoring must go with router logits; got scoring 'sigmoid' with \(indices, weights\)"),
    ((X, (TOP, X[:, :2]), UP, DOWN), dict(normalize=False), ValueError, "must go with router log"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, normalize=None), TypeError, "normalize must be True or"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, recipe=None), TypeError, "recipe must be a jax_fp8gemm"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, capacity_factor="all"), TypeError,
     "capacity_factor must be None or a number above 0; got 'all'"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, capacity_factor=0), ValueError, "or above 0; got 0"),
    ((X, LOGITS2, UP, DOWN), dict(top_k=2, capacity_factor=np.nan), ValueError, "above 0; got nan"),
]  # fmt: skip


@pytest.mark.parametrize("args, kwargs, error, message", BAD_LAYERS)
def test_bad_layers_raise(args, kwargs, error, message):
    with raises(error, match="moe_layer: .*" + message):
        moe_layer(*args, **kwargs)


@pytest.mark.parametrize(
    "name, value", [("top_k", 2), ("normalize", True), ("capacity_factor", 2.0)]
)
def test_options_must_be_static(name, value):
    layer = lambda **kwargs: moe_layer(X, LOGITS2, UP, DOWN, **dict(dict(top_k=2), **kwargs))
    with raises(TypeError, match=f"moe_layer: {name} must be static; got a traced"):
        jax.jit(layer)(**{name: value})


def test_an_infinite_capacity_is_none():
    layer = functools.partial(moe_layer, *problem(), top_k=TOP_K, recipe=BF16)
    reference.assert_same_bits(layer(capacity_factor=math.inf), layer())


def test_the_module_is_an_attribute_of_the_package():
    assert jax_fp8gemm.moe.moe_layer is moe_layer
