"""A decoder-only mixture-of-experts transformer in Flax NNX, its sizes and its FLOP."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import controlled
import controls
import jax
import jax.numpy as jnp
from flax import nnx

from jax_fp8gemm import moe
from jax_fp8gemm import nnx as fp8
from jax_fp8gemm.moe.configs import MoEConfig

VOCAB, HEAD_DIM = 256, 64  # tokens are bytes
DOCUMENT = 64  # tokens of a document, where `light` makes documents


@dataclass(frozen=True)
class Size:
    """Sizes of a model. The first layer has a dense MLP, as in DeepSeek-V3; others have experts.

    Attributes:
      dim: width; layers: blocks; length: tokens of a sequence; batch: sequences of a step.
      experts, top_k, f: experts of a layer, how many a token takes, the width of each.
      rate: the peak learning rate.
      attention: the implementation of jax.nn.dot_product_attention, "xla" or "cudnn".
      light: 0: a sequence is one text. Else it is cut into documents of DOCUMENT tokens that do not
        attend to each other. Every other document has token ids and a head of its own, and its
        loss counts this little.
    """

    dim: int
    layers: int
    experts: int
    top_k: int
    f: int
    length: int
    batch: int
    rate: float
    attention: str = "xla"
    light: float = 0.0

    @property
    def vocab(self) -> int:
        """The token ids."""
        return VOCAB * (2 if self.light else 1)

    def config(self) -> MoEConfig:
        """Returns the block: sigmoid scores, a bias that balances, and one shared expert."""
        return MoEConfig(
            hidden=self.dim,
            intermediate=self.f,
            num_experts=self.experts,
            top_k=self.top_k,
            num_shared_experts=1,
            scoring="sigmoid",
            has_balance_bias=True,
        )


SIZES = {
    "tiny": Size(128, 2, 4, 2, 128, length=64, batch=8, rate=3e-3),
    "30m": Size(384, 6, 16, 4, 256, length=512, batch=16, rate=1.5e-3),
    "300m": Size(1024, 10, 16, 4, 512, length=1024, batch=32, rate=6e-4),
    "1b": Size(2048, 8, 16, 4, 1024, length=2048, batch=64, rate=3e-4),
}


def rotate(x):
    """Returns x (batch, length, heads, HEAD_DIM) turned by position; halves are the pairs."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    frequencies = 1e4 ** (-jnp.arange(a.shape[-1], dtype=jnp.float32) / a.shape[-1])
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q, k, v, size: Size):
    """Returns causal attention. By XLA it has the same bits in every run, but much to write.

    Its backward pass computes it again.
    """
    implementation, mask = size.attention, None
    if size.light:
        document = jnp.arange(q.shape[1]) // DOCUMENT
        mask = (document[:, None] == document)[None, None]
    run = functools.partial(
        jax.nn.dot_product_attention, mask=mask, is_causal=True, implementation=implementation
    )
    return (jax.checkpoint(run) if implementation == "xla" else run)(q, k, v)


class Block(nnx.Module):
    """Causal attention and a mixture of experts, or a dense MLP, each behind a norm."""

    def __init__(self, size, is_dense, recipe, mesh, rngs):
        linear, swiglu, experts = _modules(recipe, mesh)
        how = dict(dtype=jnp.bfloat16, rngs=rngs)
        linear = functools.partial(linear, use_bias=False, **how)
        norm = functools.partial(nnx.RMSNorm, size.dim, dtype=jnp.bfloat16, rngs=rngs)
        self.size = size
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.qkv, self.out = linear(size.dim, 3 * size.dim), linear(size.dim, size.dim)
        if is_dense:
            f = (size.top_k + 1) * size.f  # as many as a token meets in the other layers
            self.mlp = swiglu(size.dim, f, **how)
        else:
            self.mlp = experts(size.config(), **how)
        # Small beside x at first, so that tokens still differ in the last block.
        added = [self.out.kernel] + [getattr(self.mlp, n) for n in _DOWN if hasattr(self.mlp, n)]
        for kernel in added:
            kernel[...] *= (2 * size.layers) ** -0.5

    def __call__(self, x):
        """Returns x after the block, and the load and loss of balance of its experts, or None."""
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], -1, HEAD_DIM), 3, axis=2)
        heads = attend(rotate(q), rotate(k), v, self.size)
        x = x + self.out(heads.reshape(x.shape))
        h = self.mlp_norm(x)
        if isinstance(self.mlp, fp8.MoE):
            out, load = self.mlp(h, return_load=True)
            # The loss of balance counts all tokens alike, so it must not move light ones.
            seen = jax.lax.stop_gradient(h) if self.size.light else h
            logits = jnp.matmul(seen.astype(jnp.float32), self.mlp.router[...])
            return x + out, (load, moe.load_balancing_loss(logits, load, scoring="sigmoid"))
        return x + self.mlp(h), None


_DOWN = ("w_down", "shared_down")


def _modules(recipe, mesh):
    """Returns what makes a Linear, a SwiGLU and a MoE with a recipe, or with a Control."""
    if isinstance(recipe, controls.Control):
        if mesh is not None:
            raise ValueError("a control runs on one device; got a mesh: leave out --mesh")
        product = functools.partial(controls.dot_general, recipe)
        linear = functools.partial(nnx.Linear, dot_general=product)
        others = (functools.partial(c, control=recipe) for c in (controlled.SwiGLU, controlled.MoE))
        return linear, *others
    parallel = {} if mesh is None else dict(expert_axis="expert", mesh=mesh)
    linear, swiglu = (functools.partial(c, recipe=recipe) for c in (fp8.Linear, fp8.SwiGLU))
    return linear, swiglu, functools.partial(fp8.MoE, recipe=recipe, **parallel)


class LanguageModel(nnx.Module):
    """Bytes (batch, length) -> f32 logits of the next byte, loads (layers - 1, experts), a loss.

    The loss is that of balance, the sum over layers: 1 for each whose experts have the same load.
    Embedding and head stay in bf16, the router in f32.
    """

    def __init__(self, size, recipe, mesh, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        # As large as what a block adds. With smaller values all tokens would look alike behind the
        # first attention, which begins as a mean of tokens, and would choose the same experts.
        self.embed = linear(size.vocab, size.dim, kernel_init=jax.nn.initializers.normal(1.0))
        # The first loss is little more than the logarithm of the vocabulary.
        self.head = linear(size.dim, size.vocab, kernel_init=jax.nn.initializers.normal(0.02))
        blocks = [Block(size, i == 0, recipe, mesh, rngs) for i in range(size.layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(size.dim, dtype=jnp.bfloat16, rngs=rngs)
        fp8.name_scopes(self)  # for statistics and profiles

    def __call__(self, tokens):
        # Not a look-up: on a GPU its gradient is added in an order that changes from run to run.
        x, found = self.embed(jax.nn.one_hot(tokens, self.embed.in_features)), []
        for block in self.blocks:
            x, of_experts = block(x)
            found += [] if of_experts is None else [of_experts]
        loads, uneven = (jnp.stack(values) for values in zip(*found, strict=True))
        return self.head(self.norm(x)).astype(jnp.float32), loads, jnp.sum(uneven)


def count(size: Size, params: Any) -> tuple[int, int, float]:
    """Returns the parameters, those that one token meets, and the FLOP of training on one token.

    The FLOP are the model's: 6 for each parameter of a product that the token meets, and those of
    causal attention. What the implementation computes again or pads is not in them.
    """
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    idle = 3 * size.dim * size.f * (size.experts - size.top_k) * (size.layers - 1)
    attention = 6 * size.layers * size.dim * size.length
    return total, total - idle, 6.0 * (total - idle - size.vocab * size.dim) + attention
