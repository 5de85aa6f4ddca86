"""The family `fsdp`: a training step whose weights are sharded over the GPUs that share the tokens.

Layers as Llama has them, x + down(silu(y gate) * (y up)) with y = rms_norm(x); forward, backward
and Adam. Weights are bf16, its two moments f32.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8gemm
from benchmarks.case import Case
from benchmarks.families.mesh import AXIS, collectives_at_once, local_mesh, step_call
from benchmarks.families.mlp import Product
from benchmarks.families.training import State, new_state, train
from benchmarks.problem import Shape, Work
from benchmarks.timing.timer import Call
from jax_fp8gemm import checkpoint_policies
from jax_fp8gemm.moe import gated_mlp

_PRODUCTS_SAVED = "scan, products saved"
_GATED = "scan, gated_mlp"
_THREE_AT_ONCE = collectives_at_once(3)  # 1.2 % faster than two on four H200s
# Of y (tokens, hidden) and the weights of a layer.
ApplyMlp = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers one after another.

    Attributes:
      tokens: of each GPU.
      loop: "unrolled", "scan" over layers, "scan, gated_mlp", where ours has gate and up in one
        weight and is one call (bf16 is faster with two weights, and has them), or "scan, products
        saved", whose layers keep the results of products, and compute the rest again from these and
        their input (jax.checkpoint).
      sums: the Recipe's reduce_dtype, in which our gradients are added.
    """

    name: str
    num_layers: int
    hidden: int
    inter: int
    tokens: int
    loop: str
    sums: Literal["f32", "bf16"] = "f32"

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the weights of a layer: gate, up and down, or gate | up and down."""
        into = [(self.hidden, self.inter)] * 2
        if self.loop == _GATED:
            into = [(self.hidden, 2 * self.inter)]
        return [*into, (self.inter, self.hidden)]

    @property
    def num_weights(self) -> int:
        return 3 * self.num_layers * self.hidden * self.inter

    @property
    def flop(self) -> int:
        """Of one GPU: three products forward and six backward, less two of the first layer."""
        num_products = 9 * self.num_layers - 2
        return 2 * num_products * self.tokens * self.hidden * self.inter


def _stack(loop: str, tokens: int, sums: Literal["f32", "bf16"]) -> Stack:
    return Stack("llama3_70b_x4", 4, 8192, 28672, tokens, loop, sums)


STACKS = (
    _stack("unrolled", 8192, "f32"),
    _stack("unrolled", 8192, "bf16"),
    _stack("unrolled", 4096, "f32"),
    _stack("unrolled", 4096, "bf16"),
    _stack("scan", 8192, "f32"),
    _stack("scan", 8192, "bf16"),
    _stack("scan", 4096, "bf16"),
    _stack(_GATED, 8192, "f32"),
    _stack(_GATED, 8192, "bf16"),
    _stack(_GATED, 4096, "bf16"),
    _stack(_PRODUCTS_SAVED, 8192, "bf16"),
)


def fsdp_case(stack: Stack) -> Case:
    """Our step beside the same with XLA's products in bf16. Figures are those of one GPU.

    Where partial sums are in bf16, as XLA's are, also beside ours with weight gradients from
    squares.
    """
    s, num_devices = stack, local_mesh().size
    recipe = jax_fp8gemm.Recipe(reduce_dtype=s.sums)
    of_bf16 = dataclasses.replace(stack, loop="scan") if s.loop == _GATED else stack
    peers = {"xla_bf16": lambda: fsdp_call(of_bf16, mlp_of(jnp.matmul))}
    if s.sums == "bf16":
        square = dataclasses.replace(recipe, wgrad_lhs_block=(128, 128))
        peers["square_wgrad"] = lambda: fsdp_call(stack, _our_mlp(s, square))
    # The shards of weights and moments, read and written once; tokens in, and what they shall be.
    num_bytes = 20 * s.num_weights // num_devices + 4 * s.tokens * s.hidden
    return Case(
        labels=dict(
            name=s.name,
            gpus=num_devices,
            tokens=s.tokens,
            hidden=s.hidden,
            inter=s.inter,
            mode=s.loop,
            sums=s.sums,
        ),
        shape=Shape(s.tokens, s.inter, s.hidden),
        work=Work(s.flop, num_bytes),
        config="",
        build=lambda: fsdp_call(stack, _our_mlp(s, recipe)),
        peers=peers,
    )


def _our_mlp(stack: Stack, recipe: jax_fp8gemm.Recipe) -> ApplyMlp:
    if stack.loop == _GATED:
        return functools.partial(gated_mlp, recipe=recipe)
    return mlp_of(functools.partial(jax_fp8gemm.matmul, recipe=recipe))


def mlp_of(product: Product) -> ApplyMlp:
    """The MLP of a layer, by a product of x (m, k) and w (k, n)."""

    def mlp(y: jax.Array, *weights: jax.Array) -> jax.Array:
        *into, down = weights
        gate, up = (_by_rows(product(y, w)) for w in into)
        return product(jax.nn.silu(gate) * up, down)

    return mlp


def _by_rows(x: jax.Array) -> jax.Array:
    """Without this, XLA moves activations too: weights and rows are sharded over the same axis."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(local_mesh(), P(AXIS)))


def fsdp_call(stack: Stack, mlp: ApplyMlp) -> Call:
    """The compiled training step on random tokens."""
    layer = functools.partial(_layer, mlp)
    if stack.loop == _PRODUCTS_SAVED:
        # For both: it saves the results of XLA's products, and of ours.
        layer = jax.checkpoint(layer, policy=checkpoint_policies.dots_saveable)
    step = functools.partial(train, functools.partial(_loss, layer))
    return step_call(step, *_operands(stack), options=_THREE_AT_ONCE)


def _loss(
    layer: Callable[[jax.Array, Any], jax.Array], weights: Any, x: jax.Array, target: jax.Array
) -> jax.Array:
    if isinstance(weights[0], Sequence):
        for of_layer in zip(*weights, strict=True):
            x = layer(x, of_layer)
    else:
        step = lambda x, of_layer: (layer(x, of_layer), None)
        x, _ = jax.lax.scan(step, x, tuple(weights))
    return jnp.mean((x - target).astype(jnp.float32) ** 2)


def _layer(mlp: ApplyMlp, x: jax.Array, weights: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(wide**2, axis=1, keepdims=True) + 1e-5)
    y = (wide * norm).astype(x.dtype)
    return x + _by_rows(mlp(y, *weights))


def _operands(stack: Stack) -> tuple[State, jax.Array, jax.Array]:
    """State, tokens and target, each made where it lives."""
    s, mesh = stack, local_mesh()
    is_stacked = s.loop != "unrolled"

    def draw(seed: int, shape: tuple[int, ...], scale: float) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * scale

    def weights(i: int, shape: tuple[int, int]) -> Any:
        scale = shape[0] ** -0.5  # variance 1/fan-in, as at initialisation
        if is_stacked:
            return draw(i, (s.num_layers, *shape), scale)
        return [draw(i + len(s.shapes) * layer, shape, scale) for layer in range(s.num_layers)]

    def make() -> tuple[State, jax.Array, jax.Array]:
        all_weights = [weights(i, shape) for i, shape in enumerate(s.shapes)]
        state = new_state(all_weights)
        tokens = s.tokens * mesh.size, s.hidden
        return state, draw(100, tokens, 1.0), draw(101, tokens, 1.0)

    rows = NamedSharding(mesh, P(AXIS))
    shards = NamedSharding(mesh, P(None, AXIS)) if is_stacked else rows
    state = State(shards, shards, shards, NamedSharding(mesh, P()))
    return jax.jit(make, out_shardings=(state, rows, rows))()
