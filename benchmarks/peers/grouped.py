"""Other implementations of grouped products, timed in the same run where they can be imported.

- lax_ragged_dot: jax.lax.ragged_dot on bf16; for weight gradients jax.lax.ragged_dot_general.
- tokamax: the same of tokamax, its Mosaic GPU kernel.
- deepgemm: DeepGEMM, each group padded to 128 rows, or masked; its weight gradient, which needs the
  sizes on the host, is only ever accumulated.
- cublaslt_tensorwise: torch._scaled_mm of all valid rows with one matrix. As many FLOP, an easier
  job: what a dense product would take.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import gemm_call
from benchmarks.data import normal, normal_groups
from benchmarks.peers.dense import load_torch, peer_calls, torch_fp8, torch_scales
from benchmarks.problem import GroupedShape, Shape
from benchmarks.timing.timer import Call, jax_queue

_BLOCK = 128
# lhs (tokens, m), rhs (tokens, n) -> (groups, m, n)
_RAGGED_CONTRACTION = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
RaggedDot = Callable[..., jax.Array]  # (lhs, rhs, group_sizes)


def ragged_peers(shape: GroupedShape, sizes: np.ndarray) -> dict[str, Callable[[], Call]]:
    """Builders of each peer's call, by name. Building or running one may raise: it is absent then.

    sizes: rows of each group.
    """
    build, yardstick = functools.partial, "cublaslt_tensorwise"
    dense = Shape(int(sizes.sum()), shape.n, shape.k)
    return {
        yardstick: peer_calls(dense, is_1d1d=False)[yardstick],
        "lax_ragged_dot": build(_jax_call, shape, sizes, lambda: jax.lax.ragged_dot),
        "tokamax": build(_jax_call, shape, sizes, tokamax_product),
        "deepgemm": build(_deepgemm, shape, sizes),
    }


def masked_peers(
    shape: GroupedShape, sizes: np.ndarray, max_m: int
) -> dict[str, Callable[[], Call]]:
    """As `ragged_peers`, for the masked form."""
    return {"deepgemm": functools.partial(_deepgemm_masked, shape, sizes, max_m)}


def wgrad_peers(
    shape: GroupedShape, sizes: np.ndarray, accumulate: bool
) -> dict[str, Callable[[], Call]]:
    """As `ragged_peers`, for the weight gradient of each group; sizes: its tokens."""
    build, yardstick = functools.partial, "cublaslt_tensorwise"
    dense = Shape(shape.m, shape.n, int(sizes.sum()))
    peers = {
        yardstick: peer_calls(dense, is_1d1d=True)[yardstick],
        "lax_ragged_dot": build(
            _jax_wgrad, shape, sizes, accumulate, lambda: jax.lax.ragged_dot_general
        ),
        "tokamax": build(
            _jax_wgrad, shape, sizes, accumulate, build(tokamax_product, "ragged_dot_general")
        ),
    }
    return peers | {"deepgemm": build(_deepgemm_wgrad, shape, sizes)} if accumulate else peers


def tokamax_product(name: str = "ragged_dot") -> RaggedDot:
    """tokamax's function of that name on its Mosaic GPU kernel. Raises: ImportError."""
    tokamax = importlib.import_module("tokamax")
    return functools.partial(getattr(tokamax, name), implementation="mosaic")


def _jax_call(shape: GroupedShape, sizes: np.ndarray, load: Callable[[], RaggedDot]) -> Call:
    product = load()
    lhs = normal(int(sizes.sum()), shape.k, seed=0)
    rhs = normal_groups(shape.groups, shape.k, shape.n or 0, seed=1)
    group_sizes = jnp.asarray(sizes)
    run = jax.jit(lambda lhs, rhs, group_sizes: product(lhs, rhs, group_sizes=group_sizes))
    return Call(lambda: run(lhs, rhs, group_sizes), jax_queue())


def _jax_wgrad(
    shape: GroupedShape, sizes: np.ndarray, accumulate: bool, load: Callable[[], RaggedDot]
) -> Call:
    product, tokens, m, n = load(), int(sizes.sum()), shape.m, shape.n or 0

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
    total = jnp.zeros((shape.groups, m, n), jnp.float32) if accumulate else None
    return dataclasses.replace(gemm_call(multiply, operands, total), kernel="")


def _deepgemm(shape: GroupedShape, sizes: np.ndarray) -> Call:
    deep_gemm = importlib.import_module("deep_gemm")
    torch, queue = load_torch()
    group_of_row = torch.from_numpy(padded_groups(sizes)).to("cuda")
    rows = group_of_row.shape[0]
    lhs = (torch_fp8(torch, rows, shape.k), torch_scales(torch, rows, -(-shape.k // _BLOCK)))
    rhs = _deepgemm_weights(torch, shape)
    out = torch.empty(rows, shape.n, dtype=torch.bfloat16, device="cuda")
    multiply = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    return Call(lambda: multiply(lhs, rhs, out, group_of_row), queue, "gemm")


def padded_groups(sizes: np.ndarray) -> np.ndarray:
    """The group of each row where every group is padded to a multiple of 128; -1 for padding."""
    blocks = [np.full(-(-size // _BLOCK) * _BLOCK, -1, np.int32) for size in sizes]
    for i, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        block[:size] = i
    return np.concatenate(blocks)


def _deepgemm_masked(shape: GroupedShape, sizes: np.ndarray, max_m: int) -> Call:
    deep_gemm = importlib.import_module("deep_gemm")
    torch, queue = load_torch()
    groups, k = shape.groups, shape.k
    values = torch_fp8(torch, groups * max_m, k).view(groups, max_m, k)
    scales = torch.rand(groups, -(-k // _BLOCK), max_m, device="cuda").transpose(1, 2)
    rhs = _deepgemm_weights(torch, shape)
    out = torch.empty(groups, max_m, shape.n, dtype=torch.bfloat16, device="cuda")
    masked_m = torch.from_numpy(sizes).to("cuda")
    multiply = deep_gemm.m_grouped_fp8_gemm_nt_masked
    return Call(lambda: multiply((values, scales), rhs, out, masked_m, shape.m), queue, "gemm")


def _deepgemm_wgrad(shape: GroupedShape, sizes: np.ndarray) -> Call:
    deep_gemm = importlib.import_module("deep_gemm")
    torch, queue = load_torch()
    tokens, m, n = int(sizes.sum()), shape.m, shape.n or 0
    # Each group's (rows, tokens) matrix one after another, in one dimension.
    lhs, rhs = (
        (torch_fp8(torch, rows, tokens).flatten(), torch_scales(torch, rows, tokens // _BLOCK))
        for rows in (m, n)
    )
    total = torch.zeros(shape.groups, m, n, device="cuda")
    on_host, on_device = sizes.tolist(), torch.from_numpy(sizes).to("cuda")
    multiply = deep_gemm.k_grouped_fp8_gemm_nt_contiguous
    return Call(lambda: multiply(lhs, rhs, total, on_host, on_device, total), queue, "gemm")


def _deepgemm_weights(torch: Any, shape: GroupedShape) -> tuple[Any, Any]:
    groups, n, k = shape.groups, shape.n or 0, shape.k
    values = torch_fp8(torch, groups * n, k).view(groups, n, k)
    return values, torch.rand(groups, -(-n // _BLOCK), -(-k // _BLOCK), device="cuda")
