"""The family `matmul`: forward and backward of an MLP with SwiGLU, all quantisation included."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_fp8gemm
from benchmarks.case import Case, peak_bytes
from benchmarks.data import normal
from benchmarks.problem import Shape, Work
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call

Product = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Mlp:
    """down(silu(x gate) * (x up)): x (rows, hidden), gate and up (hidden, inter)."""

    name: str
    rows: int
    hidden: int
    inter: int

    @property
    def flop(self) -> int:
        return 18 * self.rows * self.hidden * self.inter  # 3 products, forward and two backward


LLAMA3_8B = Mlp("llama3_8b_mlp", 8192, 4096, 14336)


def forward_backward(product: Product) -> Callable[..., Any]:
    """(x, gate, up, down, dout) -> the result and the gradients of x and the three weights."""

    def forward(x, gate, up, down):
        return product(jax.nn.silu(product(x, gate)) * product(x, up), down)

    def run(x, gate, up, down, dout):
        out, pullback = jax.vjp(forward, x, gate, up, down)
        return out, pullback(dout)

    return run


def mlp_call(mlp: Mlp, product: Product) -> Call:
    """The compiled forward and backward on random bf16 inputs; every kernel counts."""
    rows, hidden, inter = mlp.rows, mlp.hidden, mlp.inter
    x, dout = normal(rows, hidden, seed=0), normal(rows, hidden, seed=1)
    # Weights of variance 1/fan-in, as at initialisation: activations stay near 1.
    gate = normal(hidden, inter, seed=2) * hidden**-0.5
    up = normal(hidden, inter, seed=3) * hidden**-0.5
    down = normal(inter, hidden, seed=4) * inter**-0.5
    operands = x, gate, up, down, dout
    step = jax.jit(forward_backward(product)).lower(*operands).compile()
    return Call(lambda: step(*operands), jax_queue(), peak_bytes=peak_bytes(step))


def mlp_case(mlp: Mlp) -> Case:
    """Our call beside XLA's in bf16."""
    # Read once: x, dout, three weights. Written once: the result, dx, three weight gradients.
    num_bytes = 2 * (4 * mlp.rows * mlp.hidden + 6 * mlp.hidden * mlp.inter)
    return Case(
        labels={"layer": mlp.name, "m": mlp.rows, "hidden": mlp.hidden, "inter": mlp.inter},
        shape=Shape(mlp.rows, mlp.inter, mlp.hidden),
        work=Work(mlp.flop, num_bytes),
        config="",
        build=lambda: mlp_call(mlp, jax_fp8gemm.matmul),
        peers={"xla_bf16": lambda: mlp_call(mlp, jnp.matmul)},
    )
