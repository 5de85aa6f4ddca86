"""Lists every GEMM kernel that a call can choose, for `precompile` and for tests.

_tuning/quantize_config.py lists the quantisers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from jax_fp8gemm._tuning import gated_config, tile_config
from jax_fp8gemm._tuning.few_rows import QUANTIZING_CONFIGS
from jax_fp8gemm._tuning.partial_sums import PARTIAL_SUMS_CONFIGS
from jax_fp8gemm._tuning.split_k import SPLIT_K_CONFIGS
from jax_fp8gemm._tuning.tile import Kernel

_OUTS = {
    "bf16": dict(out_f32=False, accumulate=False),
    "f32": dict(out_f32=True, accumulate=False),
    "accumulate": dict(out_f32=True, accumulate=True),
}
# grouping, is_1d1d, transpose_out, results
_GEMM_FAMILIES = (
    (0, False, False, tuple(_OUTS)),
    (0, True, False, tuple(_OUTS)),
    (0, False, True, tuple(_OUTS)),
    (tile_config.GROUPED_ROWS, False, False, ("bf16", "f32")),
    (tile_config.GROUPED_CONTRACTION, True, False, tuple(_OUTS)),
    (tile_config.GROUPED_CONTRACTION, False, True, tuple(_OUTS)),
)


def gemm_kernels(
    num_sms: int, *, all_formats: bool = False, with_clusters: bool = False
) -> Iterator[dict[str, np.int32]]:
    """Yields the attribute `config` of each GEMM kernel, those of "silu" alone of the gated ones.

    all_formats: the kernels with e5m2 operands too. with_clusters: the kernels of CLUSTER_CONFIGS
    too, which no call chooses.
    """
    for grouping, is_1d1d, transpose_out, outs in _GEMM_FAMILIES:
        family = dict(is_1d1d=is_1d1d, transpose_out=transpose_out)
        configs = tile_config.configs(grouping, **family, with_clusters=with_clusters)
        more = (
            ()
            if grouping or is_1d1d or transpose_out
            else SPLIT_K_CONFIGS + PARTIAL_SUMS_CONFIGS + QUANTIZING_CONFIGS
        )
        kind = dict(**family, grouping=grouping, num_sms=num_sms)
        for out, (lhs_e5m2, rhs_e5m2) in itertools.product(outs, formats(all_formats)):
            kernel = kind | _OUTS[out] | dict(lhs_e5m2=lhs_e5m2, rhs_e5m2=rhs_e5m2)
            of_result = configs if out == "accumulate" else (*configs, *more)
            yield from (config.attributes(**cast(Kernel, kernel)) for config in of_result)
    for (lhs_e5m2, rhs_e5m2), (e5m2, pow2_scale) in itertools.product(
        formats(all_formats), formats(all_formats)
    ):
        of_operands: dict[str, Any] = dict(lhs_e5m2=lhs_e5m2, rhs_e5m2=rhs_e5m2)
        yield gated_config.attributes(num_sms, **of_operands, e5m2=e5m2, pow2_scale=pow2_scale)


def formats(all_formats: bool) -> list[tuple[bool, bool]]:
    """Returns pairs of flags: e5m2 of two operands; or e5m2, and power-of-two scales."""
    choices = (False, True) if all_formats else (False,)
    return [(first, second) for first in choices for second in choices]
