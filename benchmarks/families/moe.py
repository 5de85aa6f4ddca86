"""The family `moe`: forward and backward of the experts of a mixture, all quantisation included."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_fp8gemm
from benchmarks.case import Case, peak_bytes
from benchmarks.data import normal, normal_groups
from benchmarks.families.grouped_problem import draw_shares
from benchmarks.peers.grouped import compiled
from benchmarks.peers.tokamax import Product, fastest
from benchmarks.problem import GroupedShape, Work
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call
from jax_fp8gemm import moe

# (x, w_gate_up, w_down, group_sizes) -> out
Layer = Callable[[jax.Array, Any, Any, jax.Array], jax.Array]
_LAX_REPEAT = 3  # a step takes up to 0.2 s
SQUARE = jax_fp8gemm.Recipe(wgrad_lhs_block=(128, 128))
_FP8_GATE_UP = jax_fp8gemm.Recipe(kept_gate_up="fp8")


@dataclasses.dataclass(frozen=True)
class Experts:
    """One expert a group: x (rows, hidden), w_gate_up (groups, hidden, 2 inter), w_down."""

    name: str
    groups: int
    hidden: int
    inter: int
    rows: int

    @property
    def flop(self) -> int:
        return 18 * self.rows * self.hidden * self.inter  # 3 products, forward and two backward


LAYERS = (
    Experts("deepseek_v3_ep32", 8, 7168, 2048, 32768),
    Experts("qwen3_30b_a3b_ep8", 16, 2048, 768, 32768),
    Experts("mixtral_8x7b", 8, 4096, 14336, 16384),
    Experts("deepseek_v3_ep8", 32, 7168, 2048, 16384),
)


def moe_case(experts: Experts) -> Case:
    """Our call beside others of our own, and beside the same layer in bf16."""
    e = experts
    # Read once: x, dout, three weights. Written once: the result, dx, three weight gradients.
    num_bytes = 2 * (4 * e.rows * e.hidden + 6 * e.groups * e.hidden * e.inter)
    call = functools.partial(_call, experts)
    with_recipe = lambda recipe: functools.partial(moe.moe_mlp, recipe=recipe)
    lax = bf16_layer(jax.lax.ragged_dot)
    return Case(
        labels=dict(name=e.name, groups=e.groups, rows=e.rows, hidden=e.hidden, inter=e.inter),
        shape=GroupedShape(e.rows, e.inter, e.hidden, e.groups),
        work=Work(e.flop, num_bytes),
        config="",
        build=lambda: call(moe.moe_mlp),
        peers={
            "quantised_once": lambda: call(moe.moe_mlp, is_quantised_once=True),
            "square_once": lambda: call(with_recipe(SQUARE), is_quantised_once=True),
            "fp8_gate_up": lambda: call(with_recipe(_FP8_GATE_UP)),
            "lax_ragged_dot": lambda: call(lax, _LAX_REPEAT),
            "lax_ragged_dot_cudnn": lambda: call(lax, _LAX_REPEAT, with_cudnn=True),
            "tokamax": lambda: fastest(
                lambda product: call(bf16_layer(product)), "ragged_dot", out_bytes=2, max_configs=3
            ),
        },
    )


def bf16_layer(product: Product) -> Layer:
    """The layer of two products with SwiGLU between, in the dtype of its operands."""

    def layer(x, w_gate_up, w_down, group_sizes):
        gate_up = product(x, w_gate_up, group_sizes=group_sizes)
        gate, up = jnp.split(gate_up, 2, axis=1)
        return product(jax.nn.silu(gate) * up, w_down, group_sizes=group_sizes)

    return layer


def forward_backward(layer: Layer) -> Callable[..., Any]:
    """(x, w_gate_up, w_down, group_sizes, dout) -> the result and three gradients."""

    def run(x, w_gate_up, w_down, group_sizes, dout):
        forward = lambda x, w_gate_up, w_down: layer(x, w_gate_up, w_down, group_sizes)
        out, pullback = jax.vjp(forward, x, w_gate_up, w_down)
        return out, jax_fp8gemm.master_weights(pullback(dout))

    return run


def _call(
    experts: Experts,
    layer: Layer,
    max_repeat: int | None = None,
    with_cudnn: bool = False,
    is_quantised_once: bool = False,
) -> Call:
    """The compiled forward and backward on random bf16 inputs; every kernel counts.

    is_quantised_once: whether the weights are quantised before, as for all micro-batches of a step.
    """
    e = experts
    x, dout = normal(e.rows, e.hidden, seed=0), normal(e.rows, e.hidden, seed=1)
    # Weights of variance 1/fan-in, as at initialisation: activations stay near 1.
    w_gate_up = normal_groups(e.groups, e.hidden, 2 * e.inter, seed=2) * e.hidden**-0.5
    w_down = normal_groups(e.groups, e.inter, e.hidden, seed=2 + e.groups) * e.inter**-0.5
    group_sizes = jnp.asarray(draw_shares(e.groups, e.rows))
    weights: tuple[Any, Any] = w_gate_up, w_down
    if is_quantised_once:
        weights = jax.tree.map(jax.jit(jax_fp8gemm.quantize_weight), weights)
    operands = (x, *weights, group_sizes, dout)
    step = compiled(jax.jit(forward_backward(layer)), operands, with_cudnn)
    return Call(
        run=lambda: step(*operands),
        queue=jax_queue(),
        max_repeat=max_repeat,
        peak_bytes=peak_bytes(step),
    )
