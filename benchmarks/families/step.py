"""The family `step`: one training step of a transformer block on one GPU, attention included.

x + attention(norm(x)), then x + mlp(norm(x)), with a SwiGLU MLP or a mixture of experts. Loss,
gradients and Adam. Without rotary embeddings, and nothing is rematerialised.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_fp8gemm
from benchmarks.case import Build, Case, peak_bytes
from benchmarks.families.mlp import Product
from benchmarks.families.moe import Layer, bf16_layer
from benchmarks.families.training import new_state, train, train_on_microbatches
from benchmarks.peers.tokamax import fastest
from benchmarks.problem import Shape, Work
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call
from jax_fp8gemm import moe

_LAX_REPEAT = 3  # a step takes a fifth of a second


@dataclasses.dataclass(frozen=True)
class Block:
    """Sizes. With experts, each token takes top_k of them, beside an MLP that all tokens pass.

    microbatches: in how many parts the sequences pass, before Adam takes the sum of the gradients.
    """

    name: str
    sequences: int
    length: int
    hidden: int
    heads: int
    kv_heads: int
    inter: int
    head_dim: int = 128
    experts: int = 0
    top_k: int = 0
    microbatches: int = 1

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights, by name."""
        d, f, kv = self.hidden, self.inter, self.kv_heads * self.head_dim
        shapes = dict(q=(d, self.heads * self.head_dim), k=(d, kv), v=(d, kv))
        shapes |= dict(o=(self.heads * self.head_dim, d), gate=(d, f), up=(d, f), down=(f, d))
        if self.experts:
            shapes |= dict(router=(d, self.experts))
            shapes |= dict(experts_gate_up=(self.experts, d, 2 * f))
            shapes |= dict(experts_down=(self.experts, f, d))
        return shapes

    @property
    def flop(self) -> int:
        """Of the model: six a weight that a token passes, and of causal attention."""
        d, f, heads = self.hidden, self.inter, self.heads * self.head_dim
        weights = 2 * d * (heads + self.kv_heads * self.head_dim) + 3 * d * f * (1 + self.top_k)
        scores_and_values = 2 * self.length * heads  # of half a sequence, two products
        return self.tokens * (6 * weights + 3 * scores_and_values)


BLOCKS = (
    Block("llama3_8b_block", 2, 4096, hidden=4096, heads=32, kv_heads=8, inter=14336),
    # What one of 32 GPUs has of its experts, and as many rows for them.
    Block(
        *("deepseek_v3_block", 2, 4096),
        **dict(hidden=7168, heads=56, kv_heads=8, inter=2048, experts=8, top_k=4),
    ),
    Block(
        *("deepseek_v3_block_4_microbatches", 4, 4096),
        **dict(hidden=7168, heads=56, kv_heads=8, inter=2048, experts=8, top_k=4, microbatches=4),
    ),
)


def step_case(block: Block) -> Case:
    """Our step beside the same in bf16. Read once and written once: weights, moments, tokens."""
    b = block
    num_weights = sum(functools.reduce(lambda x, y: x * y, s) for s in b.shapes.values())
    call = functools.partial(step_call, block)
    peers: dict[str, Build] = {"xla_bf16": lambda: call(jnp.matmul, None)}
    if b.experts:
        peers = {
            "lax_ragged_dot": lambda: call(
                jnp.matmul, bf16_layer(jax.lax.ragged_dot), max_repeat=_LAX_REPEAT
            ),
            "tokamax": lambda: fastest(
                lambda product: call(jnp.matmul, bf16_layer(product)),
                "ragged_dot",
                out_bytes=2,
                max_configs=3,
            ),
        }
    if b.microbatches > 1:
        once = lambda: call(jax_fp8gemm.matmul, moe.moe_mlp, is_quantised_once=True)
        peers = {"quantised_once": once} | peers
    return Case(
        labels=dict(name=b.name, tokens=b.tokens, hidden=b.hidden, inter=b.inter),
        shape=Shape(b.tokens, b.inter, b.hidden),
        work=Work(b.flop, 20 * num_weights + 4 * b.tokens * b.hidden),
        config="",
        build=lambda: call(jax_fp8gemm.matmul, moe.moe_mlp),
        peers=peers,
    )


def step_call(
    block: Block,
    product: Product,
    experts: Layer | None,
    max_repeat: int | None = None,
    is_quantised_once: bool = False,
) -> Call:
    """The compiled step, each on the state of the one before; every kernel counts.

    is_quantised_once: whether weights are quantised before the micro-batches, not in each of them.
    """
    num, (weights, x, target) = block.microbatches, jax.jit(functools.partial(_operands, block))()
    part = dataclasses.replace(block, sequences=block.sequences // num)
    loss = functools.partial(_loss, part, product, experts)
    prepare = _quantised if is_quantised_once else lambda weights: weights
    run_step = functools.partial(train, loss)
    if num > 1:
        run_step = functools.partial(train_on_microbatches, loss, prepare, num)
    step = jax.jit(run_step, donate_argnums=0)
    states = [new_state(weights)]
    program = step.lower(states[0], x, target).compile()

    def run() -> jax.Array:
        states[0], value = program(states[0], x, target)
        return value

    return Call(run, jax_queue(), max_repeat=max_repeat, peak_bytes=peak_bytes(program))


def _quantised(weights: dict[str, jax.Array]) -> dict[str, Any]:
    """The weights, quantised but for the router's, whose product is none of FP8."""
    of_fp8 = {name: jax_fp8gemm.quantize_weight(w) for name, w in weights.items()}
    return of_fp8 | {name: w for name, w in weights.items() if name == "router"}


def _loss(
    block: Block, product: Product, experts: Layer | None, weights: Any, x: Any, target: Any
) -> jax.Array:
    x = x + _attention(block, product, weights, _norm(x))
    y = _norm(x)
    out = product(
        jax.nn.silu(product(y, weights["gate"])) * product(y, weights["up"]), weights["down"]
    )
    if block.experts:
        out = out + _mixture(block, experts, weights, y)
    return jnp.mean((x + out - target).astype(jnp.float32) ** 2)


def _attention(block: Block, product: Product, weights: Any, y: jax.Array) -> jax.Array:
    b = block
    split: Callable[[jax.Array, int], jax.Array] = lambda a, heads: a.reshape(
        b.sequences, b.length, heads, b.head_dim
    )
    q = split(product(y, weights["q"]), b.heads)
    k, v = (split(product(y, weights[name]), b.kv_heads) for name in "kv")
    on_gpu = jax.default_backend() == "gpu"
    implementation = "cudnn" if on_gpu else None
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return product(out.reshape(b.tokens, -1), weights["o"])


def _mixture(block: Block, experts: Layer | None, weights: Any, y: jax.Array) -> jax.Array:
    indices, shares = moe.route(y @ weights["router"], block.top_k)
    rows, group_sizes, order = moe.permute(y, indices, block.experts)
    assert experts is not None
    out = experts(rows, weights["experts_gate_up"], weights["experts_down"], group_sizes)
    return moe.unpermute(out, order, shares)


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=1, keepdims=True) + 1e-5)).astype(x.dtype)


def _operands(block: Block) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Weights of variance 1/fan-in, tokens and target."""
    draw = lambda i, shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    weights = {
        name: draw(i, shape) * shape[-2] ** -0.5
        for i, (name, shape) in enumerate(block.shapes.items())
    }
    tokens = block.tokens, block.hidden
    return weights, draw(100, tokens), draw(101, tokens)
