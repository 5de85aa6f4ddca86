"""Other implementations of the same products, timed in the same run where they can be imported.

- cublaslt_tensorwise: torch._scaled_mm, one scale a tensor, fast accumulation: an easier job.
- cublaslt_block: torch.nn.functional.scaled_mm with our scale blocks.
- torch_bf16: torch.mm on bf16.
- xla_bf16: jax.lax.dot_general on bf16.
- deepgemm: DeepGEMM.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.problem import Shape
from benchmarks.timing.timer import Call, TorchQueue, jax_queue

_FP8_MAX = 448.0


def peer_calls(shape: Shape, is_1d1d: bool) -> dict[str, Callable[[], Call]]:
    """Builders of each peer's call, by name. Building or running one may raise: it is absent then.

    is_1d1d: f32 results and 1x128 scales on both sides, as the weight gradient has them; otherwise
      bf16 results and 128x128 scales on the right.
    """
    build = functools.partial
    return {
        "cublaslt_tensorwise": build(_cublaslt_tensorwise, shape, is_1d1d),
        "cublaslt_block": build(_cublaslt_block, shape, is_1d1d),
        "torch_bf16": build(_torch_bf16, shape),
        "xla_bf16": build(_xla_bf16, shape, is_1d1d),
        "deepgemm": build(_deepgemm, shape, is_1d1d),
    }


@functools.cache
def load_torch() -> tuple[Any, TorchQueue]:
    """torch and its queue. Raises: ImportError or RuntimeError where it is of no use."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    return torch, TorchQueue(torch)


def torch_fp8(torch: Any, rows: int, columns: int) -> Any:
    """(rows, columns) e4m3, normal, each row scaled to the whole range."""
    values = torch.randn(rows, columns, dtype=torch.float32, device="cuda")
    values *= _FP8_MAX / values.abs().amax(1, keepdim=True)
    return values.to(torch.float8_e4m3fn)


def torch_scales(torch: Any, rows: int, num_blocks: int) -> Any:
    """(rows, num_blocks) f32, rows minor."""
    return torch.rand(num_blocks, rows, device="cuda").t()


def _cublaslt_tensorwise(shape: Shape, is_1d1d: bool) -> Call:
    torch, queue = load_torch()
    lhs, rhs = torch_fp8(torch, shape.m, shape.k), torch_fp8(torch, shape.n or 0, shape.k).t()
    scale = torch.rand((), device="cuda")
    out = torch.float32 if is_1d1d else torch.bfloat16
    arguments = dict(scale_a=scale, scale_b=scale, out_dtype=out, use_fast_accum=True)
    return Call(lambda: torch._scaled_mm(lhs, rhs, **arguments), queue)


def _cublaslt_block(shape: Shape, is_1d1d: bool) -> Call:
    torch, queue = load_torch()
    functional = torch.nn.functional
    m, n, k = shape.m, shape.n or 0, shape.k
    num_blocks = -(-k // 128)
    lhs, rhs = torch_fp8(torch, m, k), torch_fp8(torch, n, k).t()
    lhs_scale = torch_scales(torch, m, num_blocks)
    row, block = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    if is_1d1d:
        rhs_scale, rhs_recipe = torch_scales(torch, n, num_blocks), row
    else:  # cuBLASLt wants the k blocks minor and padded to a multiple of 4
        padded = -(-num_blocks // 4) * 4
        rhs_scale, rhs_recipe = torch.rand(-(-n // 128), padded, device="cuda").t(), block
    arguments = (lhs, rhs, lhs_scale, row, rhs_scale, rhs_recipe)
    out = torch.float32 if is_1d1d else torch.bfloat16
    return Call(lambda: functional.scaled_mm(*arguments, output_dtype=out), queue)


def _torch_bf16(shape: Shape) -> Call:
    torch, queue = load_torch()
    lhs = torch.randn(shape.m, shape.k, dtype=torch.bfloat16, device="cuda")
    rhs = torch.randn(shape.n, shape.k, dtype=torch.bfloat16, device="cuda").t()
    return Call(lambda: torch.mm(lhs, rhs), queue)


def _xla_bf16(shape: Shape, is_1d1d: bool) -> Call:
    lhs, rhs = normal(shape.m, shape.k, seed=0), normal(shape.n or 0, shape.k, seed=1)
    out = jnp.float32 if is_1d1d else jnp.bfloat16
    dot = jax.jit(
        lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out)
    )
    return Call(lambda: dot(lhs, rhs), jax_queue())


def _deepgemm(shape: Shape, is_1d1d: bool) -> Call:
    deep_gemm = importlib.import_module("deep_gemm")
    torch, queue = load_torch()
    m, n, k = shape.m, shape.n or 0, shape.k
    num_blocks = -(-k // 128)
    lhs = (torch_fp8(torch, m, k), torch_scales(torch, m, num_blocks))
    if is_1d1d:
        rhs = (torch_fp8(torch, n, k), torch_scales(torch, n, num_blocks))
        out = torch.zeros(m, n, device="cuda")
        arguments = dict(c=out, recipe=(1, 1, 128))
    else:
        rhs = (torch_fp8(torch, n, k), torch.rand(-(-n // 128), num_blocks, device="cuda"))
        out, arguments = torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), {}
    return Call(lambda: deep_gemm.fp8_gemm_nt(lhs, rhs, out, **arguments), queue, "gemm")
