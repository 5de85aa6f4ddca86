"""The peers of grouped products."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import gemm_call
from benchmarks.data import normal, normal_groups
from benchmarks.peers import AbsentError
from benchmarks.peers.deepgemm import deepgemm_masked, deepgemm_ragged, deepgemm_ragged_wgrad
from benchmarks.peers.tokamax import Product, fastest
from benchmarks.peers.torch_dense import cublaslt_tensorwise
from benchmarks.peers.torch_grouped import torch_ragged, torch_ragged_wgrad
from benchmarks.problem import GroupedShape, Shape
from benchmarks.provenance import loaded_libraries
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call

# Of XLA:GPU, which says nothing where its cuDNN is too old for them.
_CUDNN: dict[str, str | bool] = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
_CUDNN_TEXT = "__cudnn$"
_CUDNN_VERSION = 92200  # 9.22
# lhs (tokens, m), rhs (tokens, n) -> (groups, m, n)
_RAGGED_CONTRACTION = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
_TOKAMAX_ROWS = 8  # its kernel takes no other number of rows
_LAX_REPEAT = 8  # some of XLA's take milliseconds


def ragged_peers(shape: GroupedShape, sizes: np.ndarray) -> dict[str, Callable[[], Call]]:
    """Builders of each peer's call, by name. Building or running one may raise: it is absent then.

    sizes: rows of each group.
    """
    build = functools.partial
    dense = Shape(int(sizes.sum()), shape.n, shape.k)
    call = build(_jax_ragged, shape, sizes)
    return {
        "deepgemm": build(deepgemm_ragged, shape, sizes),
        "cublaslt_tensorwise": build(cublaslt_tensorwise, dense, False),
        "torch_bf16": build(torch_ragged, shape, sizes),
        "lax_ragged_dot": build(call, jax.lax.ragged_dot),
        "lax_ragged_dot_cudnn": build(call, jax.lax.ragged_dot, with_cudnn=True),
        "tokamax": build(fastest, build(call, row_multiple=_TOKAMAX_ROWS), "ragged_dot", 2),
    }


def masked_peers(
    shape: GroupedShape, sizes: np.ndarray, max_m: int
) -> dict[str, Callable[[], Call]]:
    """As `ragged_peers`, for the masked form."""
    return {"deepgemm": functools.partial(deepgemm_masked, shape, sizes, max_m)}


def wgrad_peers(
    shape: GroupedShape, sizes: np.ndarray, accumulate: bool
) -> dict[str, Callable[[], Call]]:
    """As `ragged_peers`, for the weight gradient of each group; sizes: its tokens."""
    build = functools.partial
    dense = Shape(shape.m, shape.n, int(sizes.sum()))
    call = build(_jax_wgrad, shape, sizes, accumulate)
    return {
        "deepgemm": build(deepgemm_ragged_wgrad, shape, sizes, accumulate),
        "cublaslt_tensorwise": build(cublaslt_tensorwise, dense, True),
        "torch_bf16": build(torch_ragged_wgrad, shape, sizes),
        "lax_ragged_dot": build(call, jax.lax.ragged_dot_general),
        "lax_ragged_dot_cudnn": build(call, jax.lax.ragged_dot_general, with_cudnn=True),
        "tokamax": build(fastest, call, "ragged_dot_general", 4),
    }


def _jax_ragged(
    shape: GroupedShape,
    sizes: np.ndarray,
    product: Product,
    with_cudnn: bool = False,
    row_multiple: int = 1,
) -> Call:
    """row_multiple: there are rows after the last group's up to a multiple of it."""
    rows = -(-int(sizes.sum()) // row_multiple) * row_multiple
    lhs = normal(rows, shape.k, seed=0)
    rhs = normal_groups(shape.groups, shape.k, shape.n or 0, seed=1)
    operands = lhs, rhs, jnp.asarray(sizes)
    run = jax.jit(lambda lhs, rhs, group_sizes: product(lhs, rhs, group_sizes=group_sizes))
    program = compiled(run, operands, with_cudnn)
    return Call(lambda: program(*operands), jax_queue(), max_repeat=_LAX_REPEAT)


def compiled(run: jax.stages.Wrapped, operands: tuple, with_cudnn: bool) -> jax.stages.Compiled:
    """The program, by cuDNN's grouped kernels if asked. Raises: AbsentError where it has none."""
    if with_cudnn:
        _check_cudnn()
    program = run.lower(*operands).compile(compiler_options=_CUDNN if with_cudnn else None)
    if with_cudnn and _CUDNN_TEXT not in (program.as_text() or ""):
        raise AbsentError("XLA took no kernel of cuDNN: it needs cuDNN 9.22 or newer")
    return program


def _check_cudnn() -> None:
    """Raises: AbsentError if an older cuDNN is loaded, before XLA compiles without it."""
    version = loaded_libraries().get("cudnn")
    if version is not None and int(version) < _CUDNN_VERSION:
        raise AbsentError(f"cuDNN must be {_CUDNN_VERSION} or newer; {version} is loaded")


def _jax_wgrad(
    shape: GroupedShape,
    sizes: np.ndarray,
    accumulate: bool,
    product: Product,
    with_cudnn: bool = False,
) -> Call:
    tokens, m, n = int(sizes.sum()), shape.m, shape.n or 0

    def multiply(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        accumulate_into: jax.Array | None = None,
    ) -> jax.Array:
        out = product(
            lhs,
            rhs,
            group_sizes,
            ragged_dot_dimension_numbers=_RAGGED_CONTRACTION,
            preferred_element_type=jnp.float32,
        )
        return out if accumulate_into is None else accumulate_into + out

    operands = (normal(tokens, m, seed=0), normal(tokens, n, seed=1), jnp.asarray(sizes))
    if with_cudnn:
        compiled(jax.jit(lambda *operands: multiply(*operands)), operands, with_cudnn)
    options = _CUDNN if with_cudnn else None
    total = jnp.zeros((shape.groups, m, n), jnp.float32) if accumulate else None
    call = gemm_call(multiply, operands, total, options)
    return dataclasses.replace(call, kernel="", max_repeat=_LAX_REPEAT)
