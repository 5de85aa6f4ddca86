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
from benchmarks.families.mesh import AXIS, local_mesh, step_call
from benchmarks.families.mlp import Product
from benchmarks.families.training import State, new_state, train
from benchmarks.problem import Shape, Work
from benchmarks.timing.timer import Call
from jax_fp8gemm import checkpoint_policies

_PRODUCTS_SAVED = "scan, products saved"


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers one after another.

    Attributes:
      tokens: of each GPU.
      loop: "unrolled", "scan" over layers, or "scan, products saved", whose layers keep the results
        of products, and compute the rest again from these and their input (jax.checkpoint).
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
    def num_weights(self) -> int:
        return 3 * self.num_layers * self.hidden * self.inter

    @property
    def flop(self) -> int:
        """Of one GPU: three products forward and six backward, less two of the first layer."""
        num_products = 9 * self.num_layers - 2
        return 2 * num_products * self.tokens * self.hidden * self.inter


STACKS = tuple(
    Stack("llama3_70b_x4", 4, 8192, 28672, tokens, loop, sums)
    for loop in ("unrolled", "scan", _PRODUCTS_SAVED)
    for tokens in (8192, 4096)
    for sums in ("f32", "bf16")
)


def fsdp_case(stack: Stack) -> Case:
    """Our step beside the same with XLA's products in bf16. Figures are those of one GPU."""
    s, num_devices = stack, local_mesh().size
    recipe = jax_fp8gemm.Recipe(reduce_dtype=s.sums)
    ours = functools.partial(jax_fp8gemm.matmul, recipe=recipe)
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
        build=lambda: fsdp_call(stack, ours),
        peers={"xla_bf16": lambda: fsdp_call(stack, jnp.matmul)},
    )


def fsdp_call(stack: Stack, product: Product) -> Call:
    """The compiled training step on random tokens."""
    rows = NamedSharding(local_mesh(), P(AXIS))

    def product_of_rows(x: jax.Array, w: jax.Array) -> jax.Array:
        # Without, XLA moves activations as well: weights and rows are sharded over the same axis.
        return jax.lax.with_sharding_constraint(product(x, w), rows)

    layer = functools.partial(_layer, product_of_rows)
    if stack.loop == _PRODUCTS_SAVED:
        # For both: it saves the results of XLA's products, and of ours.
        layer = jax.checkpoint(layer, policy=checkpoint_policies.dots_saveable)
    step = functools.partial(train, functools.partial(_loss, layer))
    return step_call(step, *_operands(stack))


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


def _layer(product: Product, x: jax.Array, weights: Any) -> jax.Array:
    gate, up, down = weights
    wide = x.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(wide**2, axis=1, keepdims=True) + 1e-5)
    y = (wide * norm).astype(x.dtype)
    return x + product(jax.nn.silu(product(y, gate)) * product(y, up), down)


def _operands(stack: Stack) -> tuple[State, jax.Array, jax.Array]:
    """State, tokens and target, each made where it lives."""
    s, mesh = stack, local_mesh()
    is_stacked = s.loop != "unrolled"
    shapes = [(s.hidden, s.inter), (s.hidden, s.inter), (s.inter, s.hidden)]

    def draw(seed: int, shape: tuple[int, ...], scale: float) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * scale

    def weights(i: int, shape: tuple[int, int]) -> Any:
        scale = shape[0] ** -0.5  # variance 1/fan-in, as at initialisation
        if is_stacked:
            return draw(i, (s.num_layers, *shape), scale)
        return [draw(i + 3 * layer, shape, scale) for layer in range(s.num_layers)]

    def make() -> tuple[State, jax.Array, jax.Array]:
        all_weights = [weights(i, shape) for i, shape in enumerate(shapes)]
        state = new_state(all_weights)
        tokens = s.tokens * mesh.size, s.hidden
        return state, draw(100, tokens, 1.0), draw(101, tokens, 1.0)

    rows = NamedSharding(mesh, P(AXIS))
    shards = NamedSharding(mesh, P(None, AXIS)) if is_stacked else rows
    state = State(shards, shards, shards, NamedSharding(mesh, P()))
    return jax.jit(make, out_shardings=(state, rows, rows))()
