"""w_gate_up in pieces: what converters move, and layers whose features several devices share."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import LAYER, MLP, assert_diff_below
from errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh

from jax_fp8gemm import BF16, DEEPSEEK_V3, Recipe, quantize, quantize_weight
from jax_fp8gemm.moe import (
    ClampedSwiglu,
    gate_up_from_pieces,
    gate_up_to_pieces,
    gated_mlp,
    moe_layer,
    moe_mlp,
)
from jax_fp8gemm.nnx import SwiGLU

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
E, D, F, M, PIECES = 2, 128, 512, 256, 4
SIZES = np.array([100, 130], np.int32)  # the last 26 rows have no expert
REPLICATED = P()


def random(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


X, DOUT = random(M, D), random(M, D, seed=1)
W_GATE_UP, W_DOWN = random(E, D, 2 * F, seed=2, scale=D**-0.5), random(E, F, D, seed=3) / 16
BIASES = random(E, 2 * F, seed=4), random(E, D, seed=5)


def order(f, pieces):
    """Where each column of the pieces is in gate | up."""
    parts = np.arange(2 * f).reshape(2, pieces, f // pieces)
    return np.concatenate([parts[half, i] for i in range(pieces) for half in range(2)])


@pytest.mark.parametrize("f, pieces", [(6, 1), (6, 2), (6, 3), (6, 6), (512, 4)])
def test_converters_move_columns(f, pieces):
    w = np.random.default_rng(0).normal(size=(3, 2 * f)).astype(np.float32)
    found = gate_up_to_pieces(jnp.asarray(w), pieces)
    np.testing.assert_array_equal(found, w[:, order(f, pieces)])
    np.testing.assert_array_equal(gate_up_from_pieces(found, pieces), w)
    np.testing.assert_array_equal(gate_up_to_pieces(jnp.asarray(w[0]), pieces), found[0])


@pytest.mark.parametrize("with_transpose", [False, True, "only"])
def test_converters_and_quantisation_commute(with_transpose):
    quantised = partial(quantize, block=(128, 128), with_transpose=with_transpose)
    found = gate_up_to_pieces(quantised(W_GATE_UP), PIECES)
    expected = quantised(gate_up_to_pieces(W_GATE_UP, PIECES))
    jax.tree.map(reference.assert_same_bits, found, expected)
    back = gate_up_from_pieces(found, PIECES)
    jax.tree.map(reference.assert_same_bits, back, quantised(W_GATE_UP))


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_converters_keep_the_sharding(axis_type):
    on = mesh(axis_type)
    w = jax.device_put(np.asarray(W_GATE_UP), NamedSharding(on, P(None, None, "x")))
    sharding = None if axis_type == EXPLICIT else w.sharding
    convert = jax.jit(partial(gate_up_to_pieces, pieces=PIECES), out_shardings=sharding)
    found = convert(w)
    assert found.sharding.is_equivalent_to(w.sharding, 3)
    reference.assert_same_bits(found, gate_up_to_pieces(W_GATE_UP, PIECES))


def mlp_vjp(how, pieces, x, w_gate_up, w_down, biases, dout):
    """The result and the gradients of x, w_gate_up, w_down and, if given, the biases."""
    run = lambda x, w_gate_up, w_down, biases: moe_mlp(
        x, w_gate_up, w_down, SIZES, biases=biases, gate_up_pieces=pieces, **how
    )
    out, pullback = jax.vjp(run, x, w_gate_up, w_down, biases)
    return out, pullback(dout)


def to_pieces(w_gate_up, biases):
    convert = partial(gate_up_to_pieces, pieces=PIECES)
    return convert(w_gate_up), biases and (convert(biases[0]), biases[1])


def from_pieces(results):
    out, (dx, dw_gate_up, dw_down, dbiases) = jax.tree.map(np.asarray, results)
    convert = lambda x: gate_up_from_pieces(jnp.asarray(x), PIECES)
    dbiases = dbiases and (convert(dbiases[0]), dbiases[1])
    return [out, convert(dw_gate_up), dw_down, dbiases], dx


@functools.cache
def plain(recipe, activation, has_biases):
    run = jax.jit(mlp_vjp, static_argnums=(0, 1))
    how = FrozenHow(dict(recipe=recipe, activation=activation))
    out, (dx, *others) = run(how, 1, X, W_GATE_UP, W_DOWN, BIASES if has_biases else None, DOUT)
    return [out, *others], dx


class FrozenHow(dict):
    """Keyword arguments that jit takes as static."""

    def __hash__(self):
        return hash(tuple(self.items()))


# recipe, activation, whether there are biases
KINDS = {
    "default": (DEEPSEEK_V3, "silu", False),
    "square columns, biases": (Recipe(wgrad_lhs_block=(128, 128)), ClampedSwiglu(limit=7.0), True),
    "FP8 gate_up": (Recipe(kept_gate_up="fp8"), "silu", False),
    "bf16 gradients of weights": (Recipe(wgrad="bf16"), "gelu", False),
    "bf16": (BF16, "silu", True),
}


@pytest.mark.parametrize(
    "name", ["square columns, biases", "FP8 gate_up", "bf16 gradients of weights"]
)
def test_pieces_on_one_device(name):
    """All bits are those of gate | up but for dx, which is added up in another order."""
    recipe, activation, has_biases = KINDS[name]
    expected, dx = plain(*KINDS[name])
    w_gate_up, biases = to_pieces(W_GATE_UP, BIASES if has_biases else None)
    how = FrozenHow(dict(recipe=recipe, activation=activation))
    run = jax.jit(mlp_vjp, static_argnums=(0, 1))
    found, dx_found = from_pieces(run(how, PIECES, X, w_gate_up, W_DOWN, biases, DOUT))
    jax.tree.map(reference.assert_same_bits, found, expected)
    assert_diff_below(MLP[jnp.float32], [dx_found], [dx])


def test_pieces_of_no_tokens():
    w_gate_up, _ = to_pieces(W_GATE_UP, None)
    none = jnp.zeros_like(SIZES)
    run = lambda x, *ws: moe_mlp(x, *ws, none, gate_up_pieces=PIECES)
    out, pullback = jax.vjp(run, X[:0], w_gate_up, W_DOWN)
    gradients = pullback(out)
    assert out.shape == gradients[0].shape == (0, X.shape[1])
    assert not any(jnp.any(gradient) for gradient in gradients)


def on_mesh(on, rows, kind):
    """The compiled program, and its results on a mesh whose axis "y" cuts the features."""
    recipe, activation, has_biases = kind
    w_gate_up, biases = to_pieces(W_GATE_UP, BIASES if has_biases else None)
    tokens, columns = P(rows), P(None, None, "y")
    of_biases = biases and (P(None, "y"), P())
    specs = tokens, columns, P(None, "y"), of_biases, tokens
    put = lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(on, spec))
    operands = [
        jax.tree.map(put, x, spec)
        for x, spec in zip((X, w_gate_up, W_DOWN, biases, DOUT), specs, strict=True)
    ]
    out = jax.tree.map(lambda spec: NamedSharding(on, spec), (specs[0], specs[:4]))
    is_auto = on.axis_types[0] == AUTO
    how = FrozenHow(dict(recipe=recipe, activation=activation))
    run = jax.jit(mlp_vjp, static_argnums=(0, 1), out_shardings=out if is_auto else None)
    compiled = run.lower(how, PIECES, *operands).compile()
    return compiled, compiled(*operands)


@pytest.mark.parametrize(
    "axis_type, kind",
    [
        (AUTO, "default"),
        (EXPLICIT, "default"),
        (AUTO, "FP8 gate_up"),
        (EXPLICIT, "FP8 gate_up"),
        (EXPLICIT, "bf16"),
    ],
)
def test_features_on_several_devices(axis_type, kind):
    """Two sums are all that moves: of the results, and of dx."""
    has_biases = KINDS[kind][2]
    on = mesh(axis_type, axis_type, shape=(1, PIECES))
    compiled, results = on_mesh(on, None, KINDS[kind])
    moved = collectives(compiled)
    sums = [text for text in moved if text == f"all-reduce f32[{M},{D}]"]
    if not has_biases:
        assert moved == sums
    assert len(sums) == 2
    expected, dx = plain(*KINDS[kind])
    found, dx_found = from_pieces(results)
    # The sums over devices have another order. Weights have no sum over devices.
    assert_diff_below(MLP[jnp.float32], [found[0], dx_found], [expected[0], dx])
    if kind in ("default", "FP8 gate_up"):
        jax.tree.map(reference.assert_same_bits, found[1:3], expected[1:3])


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_tokens_and_features_on_several_devices(axis_type):
    """Devices with the same features trade tokens for columns, and no others do."""
    on = mesh(axis_type, axis_type, shape=(2, 4))
    compiled, results = on_mesh(on, "x", KINDS["default"])
    moved = collectives(compiled)
    assert moved.count(f"all-reduce f32[{M // 2},{D}]") == 2
    wide = [text for text in moved if text.endswith((f"{2 * F}]", f",{F}]", f"[{F},{D}]"))]
    assert wide == []
    expected, dx = plain(*KINDS["default"])
    found, dx_found = from_pieces(results)
    assert_diff_below(MLP[jnp.float32], [*found[:3], dx_found], [*expected[:3], dx])


def test_a_dense_layer():
    """gated_mlp, by Flax's module, and with weights that are quantised before."""
    from flax import nnx

    layer = SwiGLU(D, F, gate_up_pieces=PIECES, rngs=nnx.Rngs(0))
    layer.w_gate_up[...] = gate_up_to_pieces(W_GATE_UP[0], PIECES)
    layer.w_down[...] = W_DOWN[0]
    expected = gated_mlp(X, W_GATE_UP[0], W_DOWN[0])
    reference.assert_same_bits(layer(X), expected)
    on = mesh(EXPLICIT)
    put = lambda x, *spec: jax.device_put(np.asarray(x), NamedSharding(on, P(*spec)))
    weights = put(layer.w_gate_up[...], None, "x"), put(layer.w_down[...], "x")
    run = jax.jit(partial(gated_mlp, gate_up_pieces=PIECES))
    for kind in (lambda w: w, quantize_weight, partial(quantize, block=(128, 128))):
        operands = put(X), *map(kind, weights)
        assert collectives(run.lower(*operands).compile()) == [f"all-reduce f32[{M},{D}]"]
        assert_diff_below(MLP[jnp.float32], [run(*operands)], [expected])


EXPERTS, TOP_K = 4, 2
TOKENS, LOGITS = random(M, D, seed=6), random(M, EXPERTS, seed=7)
OF_EXPERTS = (
    random(EXPERTS, D, 2 * F, seed=8, scale=D**-0.5),
    random(EXPERTS, F, D, seed=9, scale=F**-0.5),
)


def layer_vjp(layer, x, logits, w_gate_up, w_down, dout):
    out, pullback = jax.vjp(layer, x, logits, w_gate_up, w_down)
    dx, dlogits, dw_gate_up, dw_down = pullback(dout)
    return out, dx, dlogits, gate_up_from_pieces(dw_gate_up, PIECES), dw_down


@functools.cache
def layer_truth():
    """The layer without FP8, on one device."""
    layer = partial(moe_layer, top_k=TOP_K, recipe=BF16)
    run = lambda x, logits, w_gate_up, w_down, dout: layer_vjp(
        lambda *args: layer(*args[:2], gate_up_from_pieces(args[2], PIECES), args[3]),
        *(x, logits, w_gate_up, w_down, dout),
    )
    return jax.jit(run)(*layer_operands())


def layer_operands():
    return TOKENS, LOGITS, gate_up_to_pieces(OF_EXPERTS[0], PIECES), OF_EXPERTS[1], DOUT


def test_a_layer_of_experts():
    on = mesh(EXPLICIT)
    specs = P(), P(), P(None, None, "x"), P(None, "x"), P()
    put = lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(on, spec))
    operands = list(map(put, layer_operands(), specs))
    layer = partial(moe_layer, top_k=TOP_K, gate_up_pieces=PIECES)
    run = jax.jit(lambda *args: jax.vjp(layer, *args[:4])[1](args[4]))
    compiled = run.lower(*operands).compile()
    moved = [text for text in collectives(compiled) if "f32[]" not in text]
    assert moved == [f"all-reduce f32[{TOP_K * M},{D}]"] * 2
    dx, dlogits, dw_gate_up, dw_down = compiled(*operands)
    dw_gate_up = gate_up_from_pieces(jnp.asarray(np.asarray(dw_gate_up)), PIECES)
    found = dx, dlogits, dw_gate_up, dw_down
    assert_diff_below(LAYER[DEEPSEEK_V3], found, layer_truth()[1:])


@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, BF16], ids=["fp8", "bf16"])
def test_experts_and_their_features_on_several_devices(recipe):
    """Two devices share the experts, and four the features of each. Each piece is gate | up."""
    on = mesh(EXPLICIT, EXPLICIT, shape=(2, PIECES))

    def layer(*operands):
        out = moe_layer(*operands, top_k=TOP_K, recipe=recipe, expert_axis="x")
        return jax.lax.psum(out, "y")

    tokens = P("x")
    specs = tokens, tokens, P("x", None, "y"), P("x", "y")
    on_devices = jax.shard_map(layer, mesh=on, in_specs=specs, out_specs=tokens)
    put = lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(on, spec))
    operands = map(put, layer_operands(), (*specs, tokens))
    found = jax.jit(partial(layer_vjp, on_devices))(*operands)
    assert_diff_below(LAYER[recipe], found, layer_truth())


def test_sentences():
    run = partial(moe_mlp, X, W_GATE_UP, W_DOWN, SIZES)
    with raises(TypeError, match="^moe_mlp: gate_up_pieces must be an int; got 2.0$"):
        run(gate_up_pieces=2.0)
    message = (
        r"^moe_mlp: gate_up_pieces must divide the f features of w_gate_up \(..., 2 f\) into parts "
        r"of multiples of 128; got gate_up_pieces {}, w_gate_up f32\[2,128,1024\]$"
    )
    for pieces in (0, 3, 8):
        with raises(ValueError, match=message.format(pieces)):
            run(gate_up_pieces=pieces)
    with raises(ValueError, match="gate_up_pieces must be 1 with expert_axis; got 4. In a shard"):
        moe_layer(*layer_operands()[:4], top_k=2, gate_up_pieces=4, expert_axis="x")
    message = "^gate_up_to_pieces: pieces must divide .* into equal parts; got pieces 3, w f32"
    with raises(ValueError, match=message):
        gate_up_to_pieces(X, 3)
    with raises(ValueError, match=r"^gate_up_from_pieces: w.block must be \(128, 128\); got \(1"):
        gate_up_from_pieces(quantize(X), 1)
