"""torch's grouped products in bf16."""

from typing import Any

import numpy as np

from benchmarks.peers.torch_dense import load_torch
from benchmarks.problem import GroupedShape
from benchmarks.timing.timer import Call


def torch_ragged(shape: GroupedShape, sizes: np.ndarray) -> Call:
    """Rows of each group times its own matrix; groups are not padded."""
    torch, queue = load_torch()
    lhs = _normal(torch, int(sizes.sum()), shape.k)
    rhs = _normal(torch, shape.groups, shape.n or 0, shape.k).transpose(1, 2)
    ends = _ends(torch, sizes)
    return Call(lambda: _grouped_mm(torch)(lhs, rhs, offs=ends), queue)


def torch_ragged_wgrad(shape: GroupedShape, sizes: np.ndarray) -> Call:
    """lhs^T rhs over the tokens of each group, with bf16 results: it has no others."""
    torch, queue = load_torch()
    tokens = int(sizes.sum())
    lhs, rhs = _normal(torch, tokens, shape.m).t(), _normal(torch, tokens, shape.n or 0)
    ends = _ends(torch, sizes)
    return Call(lambda: _grouped_mm(torch)(lhs, rhs, offs=ends), queue)


def _grouped_mm(torch: Any) -> Any:
    return getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def _normal(torch: Any, *shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _ends(torch: Any, sizes: np.ndarray) -> Any:
    return torch.from_numpy(np.cumsum(sizes).astype(np.int32)).to("cuda")
