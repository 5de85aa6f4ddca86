"""examples/decode.py: a DeepSeek-shaped checkpoint on eight devices, against float64 in NumPy."""

import importlib.util
import pathlib

import checkpoint_files as files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, PartitionSpec

from jax_fp8gemm import checkpoint
from jax_fp8gemm.moe import moe_layer

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "decode.py"
PROMPT = b"sixteen bytes it is"[:16]
P = PartitionSpec


@pytest.fixture(scope="module")
def decode():
    spec = importlib.util.spec_from_file_location("decode", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The suite's strict promotion is not for an example.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield module


@pytest.fixture(scope="module")
def folder(decode, tmp_path_factory):
    return decode.make_checkpoint(tmp_path_factory.mktemp("decode") / "published")


@pytest.fixture(scope="module")
def loaded(folder):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rules = [(r"\.experts\.", P("x")), (r"_proj\.", P(None, "x")), (r"embed|lm_head", P("x"))]
    return checkpoint.load(folder, shardings=checkpoint.sharding_rules(mesh, rules))


def caches(decode, length, dtype=jnp.float32):
    config = decode.CONFIG
    shape = (2, length, config["kv_heads"], config["head_dim"])
    return [jnp.zeros(shape, dtype)] * config["layers"]


@pytest.fixture(scope="module")
def logits(decode, loaded):
    """Of the whole prompt, with activations in f32."""
    run = jax.jit(lambda *args: decode.forward(*args, decode.CONFIG)[0])
    tokens = jnp.array(list(PROMPT))
    return np.asarray(run(loaded.tensors, tokens, caches(decode, len(PROMPT)), 0), np.float64)


class Reference:
    """The model in float64. `operand` is applied to the lhs of each FP8 product."""

    def __init__(self, config, tensors, operand):
        self.config, self.tensors, self.operand = config, tensors, operand

    def product(self, x, name):
        return self.operand(x) @ files.dequantized(self.tensors, f"{name}.weight").T

    def plain(self, name):
        return np.asarray(self.tensors[f"{name}.weight"], np.float64)

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.plain(name)

    def rotate(self, x):
        half = x.shape[-1] // 2
        turn = np.exp(1j * np.outer(np.arange(len(x)), 1e4 ** (-np.arange(half) / half)))[:, None]
        pairs = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    def attention(self, x, prefix):
        config, t = self.config, len(x)
        q, k, v = (self.product(x, f"{prefix}.{name}_proj") for name in "qkv")
        q, k, v = (y.reshape(t, -1, config["head_dim"]) for y in (q, k, v))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (np.repeat(y, config["heads"] // config["kv_heads"], axis=1) for y in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / config["head_dim"] ** 0.5
        scores = np.exp(np.where(np.tri(t), scores, -np.inf))
        scores /= scores.sum(-1, keepdims=True)
        return self.product(np.einsum("hts,shd->thd", scores, v).reshape(t, -1), f"{prefix}.o_proj")

    def swiglu(self, x, prefix):
        gate, up = (self.product(x, f"{prefix}.{name}_proj") for name in ("gate", "up"))
        return self.product(gate / (1 + np.exp(-gate)) * up, f"{prefix}.down_proj")

    def mixture(self, x, prefix):
        router = x @ self.plain(f"{prefix}.gate").T
        chosen = np.argsort(-router, axis=-1)[:, : self.config["top_k"]]
        scores = 1 / (1 + np.exp(-np.take_along_axis(router, chosen, -1)))
        scores /= scores.sum(-1, keepdims=True)
        out = self.swiglu(x, f"{prefix}.shared_experts")
        for t, (experts, weights) in enumerate(zip(chosen, scores, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                out[t] += weight * self.swiglu(x[t : t + 1], f"{prefix}.experts.{expert}")[0]
        return out

    def logits(self, tokens):
        x = self.plain("model.embed_tokens")[list(tokens)]
        for i in range(self.config["layers"]):
            layer = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            h = self.norm(x, f"{layer}.post_attention_layernorm")
            x = x + (self.mixture if i else self.swiglu)(h, f"{layer}.mlp")
        return self.norm(x, "model.norm") @ self.plain("lm_head").T


def error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def test_logits_match_float64_on_the_dequantised_weights(decode, folder, logits):
    # e4m3 rounds an activation by up to 2^-4, 2.6 % on average, and so moves a product by as much.
    # There are seven products in each of two layers: 2.6 % * sqrt(14) in the end.
    model = Reference(decode.CONFIG, files.read(folder), lambda x: x)
    assert error(logits, model.logits(PROMPT)) < 0.097


def test_each_part_matches_float64_with_the_same_activations_in_fp8(decode, folder, loaded, logits):
    # A value that f32 moves over the border of two FP8 values moves what follows by up to 2^-4 of
    # a 256th of its energy, so 0.4 %. The first token meets none.
    model = Reference(decode.CONFIG, files.read(folder), reference.fake_quantize)
    assert error(logits[0], model.logits(PROMPT)[0]) < 1e-5
    x = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    w = decode.within(loaded.tensors, "model.layers.0.")
    attention = decode.within(w, "self_attn.")
    cache = caches(decode, len(x))[0]
    out, _ = decode.attention(attention, jnp.asarray(x), cache, 0, decode.CONFIG)
    assert error(out, model.attention(np.float64(x), "model.layers.0.self_attn")) < 0.004
    for i, expected in enumerate((model.swiglu, model.mixture)):
        w = decode.within(loaded.tensors, f"model.layers.{i}.mlp.")
        out = decode.mlp(w, jnp.asarray(x), decode.CONFIG)
        assert error(out, expected(np.float64(x), f"model.layers.{i}.mlp")) < 0.004


def test_a_token_after_the_other_is_what_all_at_once_give(decode, loaded):
    tokens = list(decode.generate(loaded.tensors, decode.CONFIG, PROMPT, 4))
    run = jax.jit(lambda *args: decode.forward(*args, decode.CONFIG)[0])
    prompt = jnp.array([*PROMPT, *tokens[:-1]])
    rows = run(loaded.tensors, prompt, caches(decode, len(prompt), jnp.bfloat16), 0)
    assert tokens == rows[len(PROMPT) - 1 :].argmax(axis=-1).tolist()


def test_masked_experts_are_those_of_the_layer(decode, loaded):
    w = decode.within(loaded.tensors, "model.layers.1.mlp.")
    experts = w["experts.w_gate_up"], w["experts.w_down"]
    how = dict(top_k=2, scoring="sigmoid")
    x = jax.random.normal(jax.random.key(0), (3, 256))
    logits = jax.random.normal(jax.random.key(1), (3, 8))
    both = jax.jit(lambda *args: [run(*args, **how) for run in (moe_layer, decode.experts_of_few)])
    expected, found = both(x, logits, *experts)
    assert error(found, expected) < 1e-5


def test_eight_devices_hold_one_byte_a_weight(folder, loaded):
    stored = files.read(folder)
    num_weights = sum(x.size for name, x in stored.items() if f"{name}_scale_inv" in stored)
    held = [x for x in jax.tree.leaves(loaded.tensors) if x.dtype.itemsize == 1]
    shards = [shard.data.nbytes for x in held for shard in x.addressable_shards]
    assert sum(shards) == num_weights
    assert len(shards) == 8 * len(held)


def test_it_is_saved_back_bit_by_bit(folder, loaded, tmp_path):
    checkpoint.save(tmp_path, loaded, max_file_bytes=700_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    files.assert_same_tensors(files.read(tmp_path), files.read(folder))
