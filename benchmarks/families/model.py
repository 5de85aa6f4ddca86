"""The family `model`: a training step of a decoder in Flax NNX, by AdamW of optax.

The model is the user's own (nnx_decoder.py). All that changes is the `dot_general` of its Linear.
A second row has the layers in a scan, which computes each again in the backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_fp8gemm
from benchmarks.case import Build, Case, peak_bytes
from benchmarks.families.moe import SQUARE
from benchmarks.families.nnx_decoder import Decoder, Sizes
from benchmarks.problem import Shape, Work
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call
from jax_fp8gemm import DEEPSEEK_V3
from jax_fp8gemm import nnx as fp8_nnx

_LEARNING_RATE = 3e-4
# Four of the 32 layers of Llama-3-8B, and a quarter of its vocabulary.
LLAMA3_8B = Sizes(
    *("llama3_8b_4_layers", 4),
    **dict(hidden=4096, inter=14336, heads=32, kv_heads=8, head_dim=128, vocabulary=32768),
    **dict(sequences=2, length=4096),
)


def model_cases(sizes: Sizes) -> list[Case]:
    """Our product in the Linear but the head, beside the same model in bf16."""
    call = functools.partial(model_call, sizes)
    of_linear, of_swiglu, of_stack = [], [], []
    unrolled = lambda: call(of_linear, **in_linear(DEEPSEEK_V3))
    beside_unrolled = {
        "square_wgrad": lambda: call(of_linear, **in_linear(SQUARE)),
        "fp8_head_swiglu": lambda: call(of_swiglu, **everywhere(DEEPSEEK_V3)),
        "fp8_head_swiglu_square": lambda: call(of_swiglu, **everywhere(SQUARE)),
        "xla_bf16": lambda: call(of_linear),
    }
    in_scan = functools.partial(call, of_stack, is_scanned=True)
    scanned = lambda: in_scan(**in_linear(DEEPSEEK_V3))
    beside_scanned = {
        "quantised_once": lambda: in_scan(fp8_nnx.quantize_weights, **ours(DEEPSEEK_V3)),
        "xla_bf16": lambda: in_scan(),
    }
    return [
        _case(sizes, sizes.name, unrolled, beside_unrolled),
        _case(sizes, f"{sizes.name}_scanned", scanned, beside_scanned),
    ]


def _case(s: Sizes, name: str, build: Build, peers: dict[str, Build]) -> Case:
    """The case of our step and its peers.

    Read once and written once by AdamW: weights, two moments and gradients in f32.
    """
    num_weights = s.weights_of_products + s.hidden * s.vocabulary
    return Case(
        labels=dict(name=name, tokens=s.tokens, hidden=s.hidden, inter=s.inter),
        shape=Shape(s.tokens, s.inter, s.hidden),
        work=Work(s.flop, 28 * num_weights),
        config="",
        build=build,
        peers=peers,
    )


def in_linear(recipe: jax_fp8gemm.Recipe) -> dict[str, Any]:
    """What makes a Decoder whose Linear but the head multiply in FP8."""
    dot_general = functools.partial(jax_fp8gemm.dot_general, recipe=recipe)
    return dict(make_linear=functools.partial(nnx.Linear, dot_general=dot_general))


def ours(recipe: jax_fp8gemm.Recipe) -> dict[str, Any]:
    """The same with this package's Linear, whose weights quantize_weights finds."""
    return dict(make_linear=functools.partial(fp8_nnx.Linear, recipe=recipe))


def everywhere(recipe: jax_fp8gemm.Recipe) -> dict[str, Any]:
    """The same with the head in FP8, and fp8_nnx.SwiGLU in the place of the MLP."""
    swiglu = functools.partial(fp8_nnx.SwiGLU, dtype=jnp.bfloat16, recipe=recipe)
    how = in_linear(recipe)
    return how | dict(make_head=how["make_linear"], make_mlp=swiglu)


def model_call(
    sizes: Sizes, states: list[Any], prepare: Callable[[nnx.Module], None] | None = None, **how: Any
) -> Call:
    """The compiled step, each on the state of the one before; every kernel counts.

    Args:
      states: the state that models of the same parameters share, or none yet.
      prepare: what a step does to the model before it runs, or None.
      how: of the Decoder.
    """
    make = functools.partial(Decoder, sizes, **how)
    abstract = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    graph, _ = nnx.split(abstract)
    optimizer = optax.adamw(_LEARNING_RATE)

    @jax.jit
    def new_state() -> Any:
        weights = nnx.to_pure_dict(nnx.state(make(rngs=nnx.Rngs(0))))
        return weights, optimizer.init(weights)

    loss = functools.partial(_loss, graph, prepare)
    step = jax.jit(functools.partial(_step, loss, optimizer), donate_argnums=0)
    tokens = jax.random.randint(
        jax.random.key(1), (sizes.sequences, sizes.length + 1), 0, sizes.vocabulary
    )
    if not states:
        states.append(new_state())
    program = step.lower(states[0], tokens).compile()

    def run() -> jax.Array:
        states[0], loss = program(states[0], tokens)
        return loss

    return Call(run, jax_queue(), peak_bytes=peak_bytes(program))


def _step(loss_of: Callable[..., Any], optimizer: Any, state: Any, tokens: jax.Array) -> Any:
    weights, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(weights, tokens)
    updates, moments = optimizer.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), loss


def _loss(
    graph: Any,
    prepare: Callable[[nnx.Module], None] | None,
    weights: Any,
    tokens: jax.Array,
) -> jax.Array:
    """The mean cross-entropy of the next token."""
    model: Decoder = nnx.merge(graph, nnx.State(weights))
    if prepare is not None:
        prepare(model)
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
