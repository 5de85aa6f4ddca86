"""The peers of a product of two matrices."""

import functools
from collections.abc import Callable

from benchmarks.peers.deepgemm import deepgemm_dense
from benchmarks.peers.torch_dense import cublaslt_block, cublaslt_tensorwise, torch_bf16
from benchmarks.peers.xla_dense import xla_bf16, xla_fp8
from benchmarks.problem import Shape
from benchmarks.timing.timer import Call


def peer_calls(
    shape: Shape, is_1d1d: bool, accumulate: bool = False
) -> dict[str, Callable[[], Call]]:
    """Builders of each peer's call, by name. Building or running one may raise: it is absent then.

    is_1d1d: f32 results and 1x128 scales on both sides, as the weight gradient has them; otherwise
      bf16 results and 128x128 scales on the right.
    accumulate: of ours; DeepGEMM's 1d1d product always does.
    """
    build = functools.partial
    return {
        "deepgemm": build(deepgemm_dense, shape, is_1d1d, accumulate),
        "cublaslt_tensorwise": build(cublaslt_tensorwise, shape, is_1d1d),
        "cublaslt_block": build(cublaslt_block, shape, is_1d1d),
        "torch_bf16": build(torch_bf16, shape),
        "xla_fp8": build(xla_fp8, shape, is_1d1d),
        "xla_bf16": build(xla_bf16, shape, is_1d1d),
    }
