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

_SCALE_BLOCK = 128
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
    is_paired: bool = False,
    source: str = "plain",
    activation: Activation = "silu",
) -> dict[str, np.int32]:
    """Returns the attribute `config` of a call with operands of `dtype`.

    is_paired: whether a CTA takes tiles of dgate and of dup: `takes_pairs`.
    activation: that of the sources with "swiglu" in their names. Its constants are f32 bits.
    """
    return dict(
        mode=np.int32(MODES.index(mode)),
        input=np.int32(INPUTS.index(jnp.dtype(dtype).name)),
        e5m2=np.int32(e5m2),
        pow2_scale=np.int32(pow2_scale),
        ragged=np.int32(is_ragged),
        padded=np.int32(is_padded),
        paired=np.int32(is_paired),
        source=np.int32(SOURCES.index(source)),
        **activation_attributes(activation),
    )


def takes_pairs(source: str, m: int, f: int, dtype: Any, num_sms: int) -> bool:
    """Returns whether CTAs of a source take tiles of dgate and of dup together.

    They read gate and dh once for both, and compute the activation once. Where there are fewer
    pairs than CTAs, two of a multiprocessor, single tiles spread better.

    m: the rows. f: the columns of dh.
    """
    if source not in ("swiglu_grad", "weighted_swiglu_grad") or jnp.dtype(dtype) != jnp.bfloat16:
        return False
    if not isinstance(m, int) or not isinstance(f, int):  # left open by jax.export
        return False
    num_pairs = -(-m // _SCALE_BLOCK) * (f // _SCALE_BLOCK)
    return f % _SCALE_BLOCK == 0 and num_pairs >= 2 * num_sms


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
    how = dict(e5m2=e5m2, pow2_scale=pow2_scale, activation=activation)
    yield from _configs(kinds, **how)
    grads = [(*of_kernel, ("bfloat16",)) for *of_kernel, _ in kinds if "grad" in of_kernel[0]]
    yield from _configs(grads, **how, is_paired=True)


def _configs(
    kinds: Sequence[tuple[str, str, bool, Sequence[str]]], **how: Any
) -> Iterator[dict[str, np.int32]]:
    """Yields a config for each dtype of each kind: source, mode, whether it is ragged, dtypes."""
    for source, mode, is_ragged, inputs in kinds:
        for dtype in inputs:
            yield attributes(mode, dtype, is_ragged=is_ragged, source=source, **how)
