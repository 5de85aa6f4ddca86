"""The configs of the quantise kernels: the attribute of one call, and the list of all.

The order of names is that of the numbers in ffi/quantize/quantize_config.h.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_fp8gemm._data.activation import Activation

MODES = (
    "row",
    "column",
    "row_column",
    "block",
    "block_transposed",
    "block_both",
    "row_block_transposed",
)
INPUTS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
SOURCES = (
    "plain",
    "swiglu",
    "swiglu_grad",
    "gather",
    "weighted_gather",
    "weighted_swiglu_grad",
)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu")

_RAGGED_MODES = ("column", "row_column")
# Of what a weight gradient reads with 128x128 blocks: never a cotangent.
_SQUARE_RAGGED_MODES = ("block_transposed", "row_block_transposed")


def attributes(
    mode: str,
    dtype: Any,
    *,
    e5m2: bool,
    pow2_scale: bool,
    is_ragged: bool = False,
    is_padded: bool = False,
    source: str = "plain",
    activation: Activation = "silu",
) -> dict[str, np.int32]:
    """Returns the attribute `config` of a call with operands of `dtype`.

    activation: that of the sources with "swiglu" in their names. Its constants are f32 bits.
    """
    return dict(
        mode=np.int32(MODES.index(mode)),
        input=np.int32(INPUTS.index(jnp.dtype(dtype).name)),
        e5m2=np.int32(e5m2),
        pow2_scale=np.int32(pow2_scale),
        ragged=np.int32(is_ragged),
        padded=np.int32(is_padded),
        source=np.int32(SOURCES.index(source)),
        **activation_attributes(activation),
    )


def activation_attributes(activation: Activation) -> dict[str, np.int32]:
    """Returns what an attribute `config` says of an activation."""
    if isinstance(activation, str):
        name, constants = activation, (0.0, 0.0, 0.0)
    else:
        name = "clamped_swiglu"
        constants = activation.limit, activation.alpha, activation.up_offset
    limit, alpha, up_offset = np.array(constants, np.float32).view(np.int32)
    number = np.int32(ACTIVATIONS.index(name))
    return dict(activation=number, limit=limit, alpha=alpha, up_offset=up_offset)


def kernel_configs(*, e5m2: bool, pow2_scale: bool) -> Iterator[dict[str, np.int32]]:
    """Yields one config for each kernel of a format, those of "silu" alone among activations."""
    floats = INPUTS[:3]
    plain = [("plain", mode, False, floats) for mode in MODES]
    ragged = [("plain", mode, True, floats) for mode in (*_RAGGED_MODES, *_SQUARE_RAGGED_MODES)]
    kinds = [
        *itertools.product(SOURCES[3:5], ("row", *_RAGGED_MODES)),
        *(("gather", mode) for mode in _SQUARE_RAGGED_MODES),
    ]
    gather = [
        # FP8 inputs have columns only: rows of FP8 values are copied with their scales.
        (source, mode, mode != "row", floats if mode.startswith("row") else INPUTS)
        for source, mode in kinds
    ]
    how = dict(e5m2=e5m2, pow2_scale=pow2_scale)
    yield from _configs((*plain, *ragged), **how)
    yield from _configs(plain, **how, is_padded=True)
    yield from activation_configs("silu", **how)
    yield from _configs(gather, **how)


def activation_configs(
    activation: Activation, *, e5m2: bool, pow2_scale: bool
) -> Iterator[dict[str, np.int32]]:
    """Yields one config for each kernel of this activation."""
    pairs = [
        *itertools.product(SOURCES[1:3], ("row", *_RAGGED_MODES)),
        *(("swiglu", mode) for mode in _SQUARE_RAGGED_MODES),
    ]
    dtypes = "bfloat16", "float32"
    kinds = [
        *((source, "row", False, dtypes) for source in SOURCES[1:3]),
        *((source, mode, True, dtypes) for source, mode in pairs),
        *(("weighted_swiglu_grad", mode, True, dtypes) for mode in ("row", "row_column")),
    ]
    yield from _configs(kinds, e5m2=e5m2, pow2_scale=pow2_scale, activation=activation)


def _configs(
    kinds: Sequence[tuple[str, str, bool, Sequence[str]]], **how: Any
) -> Iterator[dict[str, np.int32]]:
    """Yields a config for each dtype of each kind: source, mode, whether it is ragged, dtypes."""
    for source, mode, is_ragged, inputs in kinds:
        for dtype in inputs:
            yield attributes(mode, dtype, is_ragged=is_ragged, source=source, **how)
