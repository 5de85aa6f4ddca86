"""Continues a prompt with a DeepSeek-shaped model, whose weights are loaded in FP8.

Names and layers are DeepSeek-V3's, but attention is grouped-query attention, not MLA, and the
router has neither groups nor bias. A token is a byte. The model is random, so what it writes is
noise. FOLDER is one that make_checkpoint saved. Without it, a model is made.

    python examples/decode.py [FOLDER] [--prompt TEXT]
"""

import argparse
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp

from jax_fp8gemm import checkpoint, matmul, quantize, scaled_ragged_dot
from jax_fp8gemm.moe import moe_layer, route

CONFIG = dict(layers=2, d=256, f=128, heads=4, kv_heads=2, head_dim=64, experts=8, top_k=2)
FEW = 4  # up to so many tokens at a time, experts run as masked products


def make_checkpoint(folder, config=CONFIG, seed=0):
    """Saves a random model in several files, as DeepSeek-V3 is published: FP8, 128x128 blocks."""
    d, f, experts = config["d"], config["f"], config["experts"]
    q, kv = (config[heads] * config["head_dim"] for heads in ("heads", "kv_heads"))
    keys = (jax.random.fold_in(jax.random.key(seed), i) for i in range(10**6))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    fp8 = lambda *shape: quantize(normal(*shape), block=(128, 128))
    bf16 = lambda *shape: normal(*shape).T.astype(jnp.bfloat16)  # (n, k), as files have it
    tensors = {"model.embed_tokens.weight": bf16(d, 256), "lm_head.weight": bf16(d, 256)}
    tensors["model.norm.weight"] = jnp.ones(d)
    for i in range(config["layers"]):
        shapes = {"q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d)}
        w = {f"self_attn.{name}_proj.weight": fp8(*shape) for name, shape in shapes.items()}
        mlp = "mlp.shared_experts" if i else "mlp"
        w |= {f"{mlp}.{name}_proj.weight": fp8(d, f) for name in ("gate", "up")}
        w |= {f"{mlp}.down_proj.weight": fp8(f, d)}
        if i:
            w |= {"mlp.gate.weight": bf16(d, experts), "mlp.experts.w_down": fp8(experts, f, d)}
            w["mlp.experts.w_gate_up"] = fp8(experts, d, 2 * f)
        w |= {f"{name}_layernorm.weight": jnp.ones(d) for name in ("input", "post_attention")}
        tensors |= {f"model.layers.{i}.{name}": x for name, x in w.items()}
    checkpoint.save(folder, checkpoint.Checkpoint(tensors), max_file_bytes=10**6)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rms_norm(x, weight):
    norm = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
    return (x * norm * weight).astype(x.dtype)


def rotate(x, positions):
    """Rotary embeddings of x (t, heads, head_dim): the halves of head_dim are the pairs."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    frequencies = 1e4 ** (-jnp.arange(a.shape[-1]) / a.shape[-1])
    cos, sin = (f(positions[:, None, None] * frequencies) for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(w, x, cache, start, config):
    """Returns the attention of tokens `start`, `start` + 1 ..., and the cache with their keys."""
    positions, split = start + jnp.arange(len(x)), (len(x), -1, config["head_dim"])
    q, k, v = (matmul(x, w[f"{name}_proj.weight"]).reshape(split) for name in "qkv")
    keys, values = cache = cache.at[:, positions].set(jnp.stack([rotate(k, positions), v]))
    is_past = jnp.arange(len(keys)) <= positions[:, None]
    out = jax.nn.dot_product_attention(rotate(q, positions), keys, values, mask=is_past[None])
    return matmul(out.reshape(len(x), -1), w["o_proj.weight"]), cache


def mlp(w, x, config):
    """Returns the mixture of experts of x (t, d), or in the first layer its SwiGLU."""
    if "gate.weight" in w:
        logits = x.astype(jnp.float32) @ w["gate.weight"].astype(jnp.float32).T
        experts = w["experts.w_gate_up"], w["experts.w_down"]
        run = experts_of_few if len(x) <= FEW else moe_layer
        out = run(x, logits, *experts, top_k=config["top_k"], scoring="sigmoid")
        return out + mlp(within(w, "shared_experts."), x, config)
    gate, up = (matmul(x, w[f"{name}_proj.weight"]) for name in ("gate", "up"))
    return matmul(jax.nn.silu(gate) * up, w["down_proj.weight"])


def experts_of_few(x, logits, w_gate_up, w_down, **routing):
    """Returns what moe_layer does for few tokens x (t, d), by masked products.

    Every expert has t rows, and those of its tokens come first. The kernels skip the other rows.
    The rows of an expert lie at the same place whatever the tokens choose.
    """
    indices, weights = route(logits, **routing)
    chosen = indices[:, :, None] == jnp.arange(logits.shape[1])  # (t, top_k, experts)
    weights = jnp.sum(chosen * weights[:, :, None], axis=1)  # (t, experts)
    order = jnp.argsort(~chosen.any(axis=1), axis=0, stable=True).T  # (experts, t)
    sizes = chosen.sum(axis=(0, 1))
    # An expert has so many rows on average. The kernels' tiles are chosen for them.
    expected_rows = -(-indices.size // logits.shape[1])
    how = dict(out_dtype=x.dtype, expected_rows=expected_rows)
    # What the other rows of gate_up hold is never read.
    rows = quantize(x[order])
    gate_up = scaled_ragged_dot(rows, w_gate_up.T, sizes, unused_rows="undefined", **how)
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    h = quantize(jax.nn.silu(gate) * up)
    out = scaled_ragged_dot(h, w_down.T, sizes, **how)
    # Each token's rows, in the order of experts: a sum in a fixed order.
    places = jnp.argsort(order, axis=1)
    rows = jnp.take_along_axis(out.astype(jnp.float32), places[:, :, None], axis=1)
    return jnp.einsum("etd,te->td", rows, weights).astype(x.dtype)


def within(tensors, prefix):
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def forward(tensors, tokens, caches, start, config):
    """Returns logits of the next tokens after `tokens` (t,), which follow `start` others."""
    caches, x = list(caches), tensors["model.embed_tokens.weight"][tokens].astype(caches[0].dtype)
    for i in range(config["layers"]):
        w = within(tensors, f"model.layers.{i}.")
        h = rms_norm(x, w["input_layernorm.weight"])
        out, caches[i] = attention(within(w, "self_attn."), h, caches[i], start, config)
        x = x + out
        h = rms_norm(x, w["post_attention_layernorm.weight"])
        x = x + mlp(within(w, "mlp."), h, config)
    x = rms_norm(x, tensors["model.norm.weight"]).astype(jnp.float32)
    return x @ tensors["lm_head.weight"].astype(jnp.float32).T, caches


def generate(tensors, config, prompt, count):
    """Yields the likeliest next token, `count` times."""
    shape = 2, len(prompt) + count, config["kv_heads"], config["head_dim"]
    caches = [jnp.zeros(shape, jnp.bfloat16)] * config["layers"]
    step = jax.jit(lambda *args: forward(*args, config))
    tokens, start = jnp.array(list(prompt)), 0
    for _ in range(count):
        logits, caches = step(tensors, tokens, caches, start)
        start, tokens = start + len(tokens), logits[-1:].argmax(axis=-1)
        yield int(tokens[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--prompt", default="To be, or not to be")
    args = parser.parse_args()
    if not args.prompt:
        parser.error("--prompt must have a character")
    if args.folder and not (args.folder / "config.json").exists():
        parser.error(f"FOLDER must be one that make_checkpoint saved; got {args.folder}")
    folder = args.folder or make_checkpoint(pathlib.Path(tempfile.mkdtemp()))
    config = json.loads((folder / "config.json").read_text())
    print(bytes(generate(checkpoint.load(folder).tensors, config, args.prompt.encode(), 16)))
