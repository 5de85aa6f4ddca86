"""The family `decode`: the products of a decoder's layers for a few tokens, one of each sequence.

Attention itself is left out, because it depends on how long sequences are. Weights are quantised
before, as a server keeps them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.case import Case
from benchmarks.problem import Shape, Work
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call
from jax_fp8gemm import ScaledArray, matmul, quantize
from jax_fp8gemm.moe import gated_mlp

Product = Callable[[jax.Array, Any], jax.Array]
Mlp = Callable[[jax.Array, Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Layers of hidden features, with an MLP of inter features."""

    name: str
    layers: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def shapes(self) -> "Weights":
        """The shapes (k, n) of the weights of a layer."""
        of_heads, of_kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return Weights(
            query=(self.hidden, of_heads),
            key=(self.hidden, of_kv),
            value=(self.hidden, of_kv),
            out=(of_heads, self.hidden),
            gate_up=(self.hidden, 2 * self.inter),
            down=(self.inter, self.hidden),
        )

    @property
    def num_weights(self) -> int:
        return self.layers * sum(k * n for k, n in self.shapes)


class Weights(NamedTuple):
    """Of one layer: its matrices (k, n), or their shapes."""

    query: Any
    key: Any
    value: Any
    out: Any
    gate_up: Any
    down: Any


# Eight of the 32 layers of Llama-3-8B: 1.7 GB in FP8, which no L2 holds.
LLAMA3_8B = Decoder(
    "llama3_8b_8_layers", 8, hidden=4096, inter=14336, heads=32, kv_heads=8, head_dim=128
)
TOKENS = (1, 4, 8, 16, 64)


def decode_cases(decoder: Decoder) -> list[Case]:
    """Ours for each number of tokens, beside a kernel more for each product, and bf16."""
    return [_case(decoder, tokens) for tokens in TOKENS]


def _case(d: Decoder, tokens: int) -> Case:
    # Read once: the weights, in FP8.
    work = Work(2 * tokens * d.num_weights, d.num_weights)
    in_fp8 = lambda **how: lambda: decode_call(d, tokens, quantised, **how)
    return Case(
        labels=dict(name=d.name, tokens=tokens, hidden=d.hidden, inter=d.inter),
        shape=Shape(tokens, d.inter, d.hidden),
        work=work,
        config="",
        build=in_fp8(product=matmul, mlp=gated_mlp),
        peers={
            "quantised_apart": in_fp8(product=apart(matmul), mlp=apart(gated_mlp)),
            "xla_bf16": lambda: decode_call(d, tokens, unquantised, jnp.matmul, bf16_mlp),
        },
    )


def decode_call(
    d: Decoder, tokens: int, prepare: Callable[[jax.Array], Any], product: Product, mlp: Mlp
) -> Call:
    """The compiled step; every kernel counts. prepare: makes of a weight what products read."""
    weights = _weights(d, prepare)
    x = jax.random.normal(jax.random.key(1), (tokens, d.hidden), jnp.bfloat16)

    def step(x: jax.Array, weights: list[Weights]) -> jax.Array:
        for w in weights:
            x = _layer(d, x, w, product, mlp)
        return x

    program = jax.jit(step).lower(x, weights).compile()
    return Call(lambda: program(x, weights), jax_queue())


@functools.lru_cache(maxsize=2)  # all rows share those in FP8, and those in bf16
def _weights(d: Decoder, prepare: Callable[[jax.Array], Any]) -> list[Weights]:
    """Random weights of variance 1 / k."""

    @jax.jit
    def new_layer(key: jax.Array) -> Weights:
        keys = jax.random.split(key, len(d.shapes))
        return Weights(*(prepare(_weight(*of)) for of in zip(keys, d.shapes, strict=True)))

    return [new_layer(jax.random.key(layer)) for layer in range(d.layers)]


def _weight(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return (jax.random.normal(key, shape) * shape[0] ** -0.5).astype(jnp.bfloat16)


def _layer(d: Decoder, x: jax.Array, w: Weights, product: Product, mlp: Mlp) -> jax.Array:
    y = _norm(x)
    query, key, value = product(y, w.query), product(y, w.key), product(y, w.value)
    # In the place of attention, what reads the three and has the shape of its result.
    heads = query.reshape(len(x), d.kv_heads, -1, d.head_dim)
    mixed = (key + value).reshape(len(x), d.kv_heads, 1, d.head_dim)
    x = x + product((heads + mixed).reshape(query.shape), w.out)
    return x + mlp(_norm(x), w.gate_up, w.down)


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def quantised(w: jax.Array) -> ScaledArray:
    """The weight of a server: one byte each, as products read it."""
    return quantize(w, block=(128, 128), with_transpose="only")


def unquantised(w: jax.Array) -> jax.Array:
    return w


def apart(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function as it runs where a gradient follows: a kernel of its own quantises x."""
    return lambda x, *weights: jax.vjp(lambda x: function(x, *weights), x)[0]


def bf16_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    gate, up = jnp.split(jnp.matmul(x, gate_up), 2, axis=-1)
    return jnp.matmul(jax.nn.silu(gate) * up, down)
