"""XLA's products of two matrices: bf16, and FP8 as XLA rewrites it."""

import jax
import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.peers import AbsentError
from benchmarks.problem import Shape
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call

_LAST = (((1,), (1,)), ((), ()))  # contracts the last dimension of both
_FP8_CALL = "cublas$lt$matmul$f8"
# XLA times many kernels for each product when it compiles it. On an H200 that took 55 s for FP8 and
# bf16 of 8192x8192x8192 together, and did not end within 200 s for 16384x6144x7168.
_MOST_FLOP_FP8 = 3e11
_MOST_FLOP_BF16 = 1.2e12


def xla_bf16(shape: Shape, is_1d1d: bool) -> Call:
    _check_size(shape, _MOST_FLOP_BF16)
    lhs, rhs = normal(shape.m, shape.k, seed=0), normal(shape.n or 0, shape.k, seed=1)
    out = jnp.float32 if is_1d1d else jnp.bfloat16
    dot = jax.jit(lambda a, b: jax.lax.dot_general(a, b, _LAST, preferred_element_type=out))
    return Call(lambda: dot(lhs, rhs), jax_queue())


def xla_fp8(shape: Shape, is_1d1d: bool) -> Call:
    """Operands times a scale each, which XLA:GPU turns into one FP8 product of cuBLASLt."""
    _check_size(shape, _MOST_FLOP_FP8)
    out = jnp.float32 if is_1d1d else jnp.bfloat16
    scale = jnp.bfloat16(1 / 64)
    lhs, rhs = (
        (normal(rows, shape.k, seed=seed) / scale).astype(jnp.float8_e4m3fn)
        for seed, rows in enumerate((shape.m, shape.n or 0))
    )

    def multiply(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
        a = a.astype(jnp.bfloat16) * jnp.broadcast_to(a_scale, a.shape)
        b = b.astype(jnp.bfloat16) * jnp.broadcast_to(b_scale, b.shape)
        return jax.lax.dot_general(a, b, _LAST, preferred_element_type=out)

    program = jax.jit(multiply).lower(lhs, rhs, scale, scale).compile()
    if _FP8_CALL not in (program.as_text() or ""):
        raise AbsentError("XLA did not turn this shape into an FP8 product")
    return Call(lambda: program(lhs, rhs, scale, scale), jax_queue())


def _check_size(shape: Shape, most_flop: float) -> None:
    flop = 2 * shape.m * (shape.n or 0) * shape.k
    if flop > most_flop:
        raise AbsentError(f"XLA's autotuning takes minutes above {most_flop:.1e} FLOP")
