"""The configs of the quantise kernels: the attribute of one call, and the list of all.

The order of names is that of the numbers in ffi/quantize/quantize_config.h.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

MODES = ("row", "column", "row_column", "block", "block_transposed", "block_both")
INPUTS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
SOURCES = ("plain", "swiglu", "swiglu_grad", "gather", "weighted_gather")

_RAGGED_MODES = ("column", "row_column")


def attributes(
    mode: str,
    dtype: Any,
    *,
    e5m2: bool,
    pow2_scale: bool,
    is_ragged: bool = False,
    source: str = "plain",
) -> dict[str, np.int32]:
    """Returns the attribute `config` of a call with operands of `dtype`."""
    return dict(
        mode=np.int32(MODES.index(mode)),
        input=np.int32(INPUTS.index(jnp.dtype(dtype).name)),
        e5m2=np.int32(e5m2),
        pow2_scale=np.int32(pow2_scale),
        ragged=np.int32(is_ragged),
        source=np.int32(SOURCES.index(source)),
    )


def kernel_configs(*, e5m2: bool, pow2_scale: bool) -> Iterator[dict[str, np.int32]]:
    """Yields one config for each kernel of a format."""
    floats = INPUTS[:3]
    plain = [("plain", mode, False, floats) for mode in MODES]
    ragged = [("plain", mode, True, floats) for mode in _RAGGED_MODES]
    swiglu = [
        (source, mode, mode != "row", ("bfloat16", "float32"))
        for source, mode in itertools.product(SOURCES[1:3], ("row", *_RAGGED_MODES))
    ]
    gather = [
        # FP8 inputs have columns only: rows of FP8 values are copied with their scales.
        (source, mode, mode != "row", INPUTS if mode == "column" else floats)
        for source, mode in itertools.product(SOURCES[3:], ("row", *_RAGGED_MODES))
    ]
    for source, mode, is_ragged, inputs in (*plain, *ragged, *swiglu, *gather):
        for dtype in inputs:
            yield attributes(
                mode,
                dtype,
                e5m2=e5m2,
                pow2_scale=pow2_scale,
                is_ragged=is_ragged,
                source=source,
            )
