"""DeepGEMM's products on Hopper, with its scales in the layout that its kernels read.

It compiles a kernel for each n, k and config at its first call, with nvcc: `warm_deepgemm` in
precompile.py does that in many processes beforehand.
"""

import importlib
from typing import Any

import numpy as np

from benchmarks.families.grouped_problem import expected_rows
from benchmarks.peers import AbsentError
from benchmarks.peers.torch_dense import load_torch, torch_fp8
from benchmarks.problem import GroupedShape, Shape
from benchmarks.timing.timer import Call

_BLOCK = 128
_KERNEL = "gemm"  # substring of the names of its kernels
_F32_SCALES = dict(disable_ue8m0_cast=True)


def deepgemm_dense(shape: Shape, is_1d1d: bool, accumulate: bool) -> Call:
    deep_gemm, torch, queue = _load()
    m, n, k = shape.m, shape.n or 0, shape.k
    lhs = torch_fp8(torch, m, k), _row_scales(torch, m, k)
    if is_1d1d:
        if not accumulate:
            raise AbsentError("DeepGEMM's product with 1x128 scales on both sides always adds")
        rhs = torch_fp8(torch, n, k), _row_scales(torch, n, k)
        out = torch.zeros(m, n, device="cuda")
        how = dict(c=out, recipe=(1, 1, _BLOCK), **_F32_SCALES)
    else:
        rhs = torch_fp8(torch, n, k), torch.rand(-(-n // _BLOCK), -(-k // _BLOCK), device="cuda")
        out, how = torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), _F32_SCALES
    return Call(lambda: deep_gemm.fp8_gemm_nt(lhs, rhs, out, **how), queue, _KERNEL)


def deepgemm_ragged(shape: GroupedShape, sizes: np.ndarray) -> Call:
    """Each group begins at a multiple of DeepGEMM's alignment."""
    deep_gemm, torch, queue = _load()
    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    group_of_row = torch.from_numpy(padded_groups(sizes, alignment)).to("cuda")
    rows = group_of_row.shape[0]
    lhs = torch_fp8(torch, rows, shape.k), _row_scales(torch, rows, shape.k)
    rhs = _weights(torch, shape)
    out = torch.empty(rows, shape.n, dtype=torch.bfloat16, device="cuda")
    multiply = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    return Call(lambda: multiply(lhs, rhs, out, group_of_row, **_F32_SCALES), queue, _KERNEL)


def padded_groups(sizes: np.ndarray, alignment: int = _BLOCK) -> np.ndarray:
    """The group of each row where every group is padded to the alignment; -1 for padding."""
    blocks = [np.full(-(-size // alignment) * alignment, -1, np.int32) for size in sizes]
    for i, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        block[:size] = i
    return np.concatenate(blocks)


def deepgemm_masked(shape: GroupedShape, sizes: np.ndarray, max_m: int) -> Call:
    deep_gemm, torch, queue = _load()
    groups, k = shape.groups, shape.k
    values = torch_fp8(torch, groups * max_m, k).view(groups, max_m, k)
    scales = torch.rand(groups, -(-k // _BLOCK), _aligned(max_m), device="cuda")
    lhs = values, scales.transpose(1, 2)[:, :max_m]
    rhs = _weights(torch, shape)
    out = torch.empty(groups, max_m, shape.n, dtype=torch.bfloat16, device="cuda")
    masked_m = torch.from_numpy(sizes).to("cuda")
    multiply = deep_gemm.m_grouped_fp8_gemm_nt_masked
    operands = lhs, rhs, out, masked_m, expected_rows(shape.m)
    return Call(lambda: multiply(*operands, **_F32_SCALES), queue, _KERNEL)


def deepgemm_ragged_wgrad(shape: GroupedShape, sizes: np.ndarray, accumulate: bool) -> Call:
    """It needs the sizes on the host, and always adds."""
    if not accumulate:
        raise AbsentError("DeepGEMM's grouped weight gradient always adds")
    deep_gemm, torch, queue = _load()
    tokens, m, n = int(sizes.sum()), shape.m, shape.n or 0
    # Each group's (rows, tokens) matrix one after another, in one dimension.
    lhs, rhs = (
        (torch_fp8(torch, rows, tokens).flatten(), _row_scales(torch, rows, tokens))
        for rows in (m, n)
    )
    total = torch.zeros(shape.groups, m, n, device="cuda")
    on_host, on_device = sizes.tolist(), torch.from_numpy(sizes).to("cuda")
    multiply = deep_gemm.k_grouped_fp8_gemm_nt_contiguous
    arguments = lhs, rhs, total, on_host, on_device, total
    return Call(lambda: multiply(*arguments, recipe=(1, 1, _BLOCK)), queue, _KERNEL)


def _load() -> tuple[Any, Any, Any]:
    """DeepGEMM, torch and its queue."""
    torch, queue = load_torch()
    return importlib.import_module("deep_gemm"), torch, queue


def _row_scales(torch: Any, rows: int, k: int) -> Any:
    """(rows, k blocks) f32 as its kernels read them: rows minor, in columns of whole 16 bytes."""
    return torch.rand(-(-k // _BLOCK), _aligned(rows), device="cuda").t()[:rows]


def _aligned(rows: int) -> int:
    return -(-rows // 4) * 4


def _weights(torch: Any, shape: GroupedShape) -> tuple[Any, Any]:
    groups, n, k = shape.groups, shape.n or 0, shape.k
    values = torch_fp8(torch, groups * n, k).view(groups, n, k)
    return values, torch.rand(groups, -(-n // _BLOCK), -(-k // _BLOCK), device="cuda")
