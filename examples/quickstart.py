"""Trains one small byte-level language model twice, in bf16 and in FP8, and prints both losses.

The text is the Python standard library's own source. The two models differ in one argument:
`nnx.Linear(dot_general=jax_fp8gemm.dot_general)`. Weights, data and seeds are the same.

    python examples/quickstart.py [--steps N] [--dim N] [--layers N] [--batch N] [--length N]
"""

import argparse
import functools
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_fp8gemm

VOCAB, HEAD_DIM = 256, 64  # bytes; every matrix dimension below is a multiple of 128


class Block(nnx.Module):
    """Causal attention and a SwiGLU MLP, each behind a norm and beside a residual."""

    def __init__(self, dim, dot_general, rngs):
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=jnp.bfloat16, dot_general=dot_general, rngs=rngs
        )
        self.attention_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.qkv, self.out = linear(dim, 3 * dim), linear(dim, dim)
        self.mlp_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.gate_up, self.down = linear(dim, 8 * dim), linear(4 * dim, dim)

    def __call__(self, x):
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], -1, HEAD_DIM), 3, axis=2)
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.reshape(x.shape))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)


class LanguageModel(nnx.Module):
    """Bytes (batch, length) -> logits of the next byte. Embedding and head stay in bf16."""

    def __init__(self, dim, num_layers, length, dot_general, rngs):
        self.embed = nnx.Embed(VOCAB, dim, rngs=rngs)
        self.position = nnx.Embed(length, dim, rngs=rngs)
        self.blocks = nnx.List([Block(dim, dot_general, rngs) for _ in range(num_layers)])
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, VOCAB, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        x = x.astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, tokens):
    loss, gradients = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, gradients)
    return loss


def read_text():
    """The standard library's top-level modules, as one array of bytes."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def main():
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = [("steps", 300, 120), ("dim", 1024, 128), ("layers", 8, 2), ("batch", 16, 8)]
    for name, gpu, cpu in [*sizes, ("length", 1024, 128)]:
        parser.add_argument(f"--{name}", type=int, default=gpu if on_gpu else cpu)
    args = parser.parse_args()
    if min(vars(args).values()) < 1 or args.dim % HEAD_DIM:
        parser.error(f"numbers must be positive, and --dim a multiple of {HEAD_DIM}; got {args}")
    print(jax_fp8gemm.backend_info(), end="\n\n")
    text = read_text()
    print(f"{len(text) / 1e6:.1f} MB of text, {args.layers} layers of width {args.dim}")

    products = {"bf16": jax.lax.dot_general, "fp8": jax_fp8gemm.dot_general}
    peak, tenth = 0.4 / args.dim, max(1, args.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0, peak, tenth, args.steps)
    runs, losses, seconds = {}, {name: [] for name in products}, dict.fromkeys(products, 0.0)
    for name, dot_general in products.items():
        model = LanguageModel(args.dim, args.layers, args.length, dot_general, nnx.Rngs(0))
        runs[name] = model, nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    print(f"{'step':>6}{'bf16 loss':>12}{'fp8 loss':>12}")
    random = np.random.default_rng(0)
    for step in tqdm(range(1, args.steps + 1), unit="step"):
        starts = random.integers(0, len(text) - args.length - 1, (args.batch, 1))
        tokens = jnp.asarray(text[starts + np.arange(args.length + 1)], jnp.int32)
        for name, (model, optimizer) in runs.items():
            start = time.perf_counter()
            losses[name].append(float(train_step(model, optimizer, tokens)))
            seconds[name] += (time.perf_counter() - start) if step > 1 else 0  # 1 compiles
        if step % tenth == 0:
            recent = [np.mean(losses[name][-tenth:]) for name in products]
            tqdm.write(f"{step:6}{recent[0]:12.4f}{recent[1]:12.4f}")
    for name, total in seconds.items():
        print(f"{name}: {total / max(1, args.steps - 1) * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()
