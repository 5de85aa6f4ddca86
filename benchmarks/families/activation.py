"""The family `activation`: the fused quantisers of each gated activation, beside SwiGLU's."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from benchmarks.case import Case
from benchmarks.data import normal
from benchmarks.families.products import QUANTIZE_KERNEL
from benchmarks.problem import Shape, gated_work
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._primitives.swiglu_quantize import swiglu_grad_quantize, swiglu_quantize
from jax_fp8gemm.moe import ClampedSwiglu

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
    "deepseek_v4": ClampedSwiglu(10.0),
    "gpt_oss": ClampedSwiglu(7.0, alpha=1.702, up_offset=1.0),
}


def activation_cases(shapes: Sequence[Shape]) -> list[Case]:
    """Forward and gradient of each activation, rows and columns in one read, m rows of f = k."""
    return [
        _case(shape, name, is_grad)
        for shape in shapes
        for is_grad in (False, True)
        for name in ACTIVATIONS
    ]


def _case(shape: Shape, name: str, is_grad: bool) -> Case:
    m, f = shape.m, shape.k
    return Case(
        labels={"m": m, "n": None, "k": f, "activation": name, "pass": "bwd" if is_grad else "fwd"},
        shape=shape,
        work=gated_work(shape, is_grad),
        config="",
        build=functools.partial(_call, m, f, ACTIVATIONS[name], is_grad),
        peers={"silu": functools.partial(_call, m, f, "silu", is_grad)},
    )


def _call(m: int, f: int, activation: Activation, is_grad: bool) -> Call:
    operands = [normal(m, 2 * f, seed=0), *([normal(m, f, seed=1)] if is_grad else [])]
    groups = jnp.full((1,), m, jnp.int32), jnp.zeros((1,), jnp.int32)
    quantize = functools.partial(
        swiglu_grad_quantize if is_grad else swiglu_quantize,
        activation=activation,
        with_columns=True,
        dtype=jnp.float8_e4m3fn,
        pow2_scale=False,
        implementation=None,
    )
    run = jax.jit(quantize)
    return Call(lambda: run(*operands, *groups), jax_queue(), QUANTIZE_KERNEL)
