"""torch's products of two matrices: cuBLASLt in FP8 and bf16."""

import functools
import importlib
from typing import Any

from benchmarks.peers import AbsentError
from benchmarks.problem import Shape
from benchmarks.timing.queues import TorchQueue
from benchmarks.timing.timer import Call

_FP8_MAX = 448.0
_MAX_DRAWN = 1 << 26  # elements


@functools.cache
def load_torch() -> tuple[Any, TorchQueue]:
    """torch and its queue. Raises: ImportError or AbsentError where it is of no use."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise AbsentError("torch sees no CUDA device")
    return torch, TorchQueue(torch)


def torch_fp8(torch: Any, rows: int, columns: int) -> Any:
    """(rows, columns) e4m3, normal, each row scaled to the whole range; rows repeat after many."""
    drawn = min(rows, max(1, _MAX_DRAWN // columns))
    values = torch.randn(drawn, columns, dtype=torch.float32, device="cuda")
    values *= _FP8_MAX / values.abs().amax(1, keepdim=True)
    as_bytes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    if drawn < rows:
        as_bytes = as_bytes.repeat(-(-rows // drawn), 1)[:rows].contiguous()
    return as_bytes.view(torch.float8_e4m3fn)


def torch_scales(torch: Any, rows: int, num_blocks: int) -> Any:
    """(rows, num_blocks) f32, rows minor."""
    return torch.rand(num_blocks, rows, device="cuda").t()


def cublaslt_tensorwise(shape: Shape, is_1d1d: bool) -> Call:
    torch, queue = load_torch()
    lhs, rhs = torch_fp8(torch, shape.m, shape.k), torch_fp8(torch, shape.n or 0, shape.k).t()
    scale = torch.rand((), device="cuda")
    out = torch.float32 if is_1d1d else torch.bfloat16
    arguments = dict(scale_a=scale, scale_b=scale, out_dtype=out, use_fast_accum=True)
    return Call(lambda: torch._scaled_mm(lhs, rhs, **arguments), queue)


def cublaslt_block(shape: Shape, is_1d1d: bool) -> Call:
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


def torch_bf16(shape: Shape) -> Call:
    torch, queue = load_torch()
    lhs = torch.randn(shape.m, shape.k, dtype=torch.bfloat16, device="cuda")
    rhs = torch.randn(shape.n, shape.k, dtype=torch.bfloat16, device="cuda").t()
    return Call(lambda: torch.mm(lhs, rhs), queue)
