"""A decoder of the shape of Llama-3 in Flax NNX, as a user would write it: it imports no FP8.

Its products are those of nnx.Linear, which take a `dot_general`. The embedding and the head are not
tied. Parameters are f32, and activations bf16. The layers follow one another in the program, or run
in a scan that computes each of them again in the backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

# (inputs, outputs, use_bias=False, dtype=bf16, rngs=rngs) -> module
MakeLinear = Callable[..., nnx.Module]
# (hidden, intermediate, rngs=rngs) -> module
MakeMlp = Callable[..., nnx.Module]
_ROPE_BASE = 500_000.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a decoder, and of a batch of it."""

    name: str
    layers: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def weights_of_products(self) -> int:
        """Elements of all matrices that a token is multiplied by; the embedding is looked up."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        of_layer = attention + 3 * self.hidden * self.inter
        return self.layers * of_layer + self.hidden * self.vocabulary

    @property
    def flop(self) -> int:
        """Of a step: six a weight and token, and of causal attention."""
        scores_and_values = 2 * self.length * self.heads * self.head_dim  # of half a sequence
        attention = self.layers * 3 * scores_and_values
        return self.tokens * (6 * self.weights_of_products + attention)


class Attention(nnx.Module):
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, sizes: Sizes, make_linear: MakeLinear, rngs: nnx.Rngs):
        linear = _linear(make_linear, rngs)
        kv = sizes.kv_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.q = linear(sizes.hidden, sizes.heads * sizes.head_dim)
        self.k, self.v = linear(sizes.hidden, kv), linear(sizes.hidden, kv)
        self.o = linear(sizes.heads * sizes.head_dim, sizes.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        split = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = _rotated(split(self.q(x))), _rotated(split(self.k(x))), split(self.v(x))
        on_gpu = jax.default_backend() == "gpu"
        implementation = "cudnn" if on_gpu else None
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        return self.o(y.reshape(*x.shape[:2], -1))


class Mlp(nnx.Module):
    """Three Linear with SwiGLU between."""

    def __init__(self, sizes: Sizes, make_linear: MakeLinear, rngs: nnx.Rngs):
        linear = _linear(make_linear, rngs)
        self.gate, self.up = (linear(sizes.hidden, sizes.inter) for _ in range(2))
        self.down = linear(sizes.inter, sizes.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        sizes: Sizes,
        make_linear: MakeLinear,
        make_mlp: MakeMlp | None,
        rngs: nnx.Rngs,
    ):
        norm = lambda: nnx.RMSNorm(sizes.hidden, dtype=jnp.bfloat16, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(sizes, make_linear, rngs)
        self.mlp = (
            make_mlp(sizes.hidden, sizes.inter, rngs=rngs)
            if make_mlp
            else Mlp(sizes, make_linear, rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Scanned(nnx.Module):
    """Layers stacked along dimension 0, in a scan; the backward pass computes each again."""

    def __init__(self, make_layer: Callable[[nnx.Rngs], Layer], num_layers: int, rngs: nnx.Rngs):
        stacked = nnx.vmap(make_layer, in_axes=(0,), out_axes=0)
        self.stack = nnx.split_rngs(splits=num_layers)(stacked)(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # In a scan XLA cannot join the two computations of a layer, so nothing need prevent it.
        run = nnx.remat(lambda layer, x: layer(x), prevent_cse=False)
        return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.stack, x)


class Decoder(nnx.Module):
    """Tokens (sequences, length) -> logits in bf16.

    make_linear: makes all Linear but the head. make_head: makes that. make_mlp: makes the MLP of a
    layer; None for Mlp. is_scanned: whether the layers are Scanned.
    """

    def __init__(
        self,
        sizes: Sizes,
        rngs: nnx.Rngs,
        make_linear: MakeLinear = nnx.Linear,
        make_head: MakeLinear = nnx.Linear,
        make_mlp: MakeMlp | None = None,
        is_scanned: bool = False,
    ):
        make_layer = lambda rngs: Layer(sizes, make_linear, make_mlp, rngs)
        self.embedding = nnx.Embed(sizes.vocabulary, sizes.hidden, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = (
            Scanned(make_layer, sizes.layers, rngs)
            if is_scanned
            else nnx.Sequential(*(make_layer(rngs) for _ in range(sizes.layers)))
        )
        self.norm = nnx.RMSNorm(sizes.hidden, dtype=jnp.bfloat16, rngs=rngs)
        self.head = _linear(make_head, rngs)(sizes.hidden, sizes.vocabulary)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def _linear(make: MakeLinear, rngs: nnx.Rngs) -> Callable[[int, int], nnx.Module]:
    return functools.partial(make, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of x (sequences, length, heads, head_dim), halves of a head as pairs."""
    half = x.shape[-1] // 2
    frequency = _ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
