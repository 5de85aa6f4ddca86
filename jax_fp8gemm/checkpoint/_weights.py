"""The weights of a checkpoint: which stored tensors make up one, and whether they fit together.

    format                          values                    scale
    DeepSeek-V3, Kimi K2, Qwen3-FP8 X FP8 (n, k)              X_scale_inv f32 or bf16, 128x128
    compressed-tensors, block       X FP8 (n, k)              X_scale f32 or bf16, 128x128
    DeepSeek-V4                     Y.weight FP8 (n, k)       Y.scale E8M0, 128x128
    DeepSeek-V4's experts           Y.weight I8 (n, k / 2)    Y.scale E8M0 (n, k / 32)

Each scale is the factor of dequantisation, "_inv" or not: real = value * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jax_fp8gemm._data.formats import FP8_DTYPES, scale_shape
from jax_fp8gemm.checkpoint._checkpoint import StoredScale
from jax_fp8gemm.checkpoint._mxfp4 import GROUP, RepackedScale, RepackedValues
from jax_fp8gemm.checkpoint._sources import AsFloat32, Source
from jax_fp8gemm.checkpoint._stored import StoredTensor, refuse

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), _E8M0)
# Above every scale of a layer: the magnitudes of its block would reach 16 * 448.
LARGEST_SCALE = 16.0


@dataclass(frozen=True)
class Weight:
    """A weight as it is read: values, and scales if it is quantised."""

    values: Source
    scale: Source | None = None
    stored_scale: StoredScale | None = None


def make_weights(tensors: Mapping[str, StoredTensor], chosen: set[str]) -> dict[str, Weight]:
    """Returns the chosen weights, without the tensors that are scales of others."""
    scales = {name: _scale_names(tensors, name) for name in tensors}
    are_scales = {scale for found in scales.values() for scale in found}
    names = [name for name in tensors if name in chosen and name not in are_scales]
    return {name: _make(tensors, tensors[name], scales[name]) for name in names}


def _scale_names(tensors: Mapping[str, StoredTensor], name: str) -> list[str]:
    """Returns the names of what may be the scale of a tensor, if its dtype goes with one."""
    if tensors[name].dtype not in (*FP8_DTYPES, np.int8, np.uint8):
        return []
    candidates = [f"{name}_scale_inv", f"{name}_scale"]
    if name.endswith(".weight"):
        candidates.append(f"{name.removesuffix('weight')}scale")
    return [scale for scale in candidates if scale in tensors]


def _make(tensors: Mapping[str, StoredTensor], values: StoredTensor, scales: list[str]) -> Weight:
    is_fp8 = values.dtype in FP8_DTYPES
    if not is_fp8 and not scales:
        return Weight(values)
    if len(scales) != 1:
        got = f"{' and '.join(scales) or f'no {values.name}_scale_inv'} for {values}"
        refuse("an FP8 or FP4 weight must have one scale", got)
    scale = tensors[scales[0]]
    if not is_fp8 and scale.dtype != _E8M0:
        must = "an int8 or uint8 weight with a scale must be packed FP4, its scale float8_e8m0fnu"
        refuse(must, f"{values} with {scale}", "8-bit integer weights cannot be loaded.")
    stored = StoredScale(scale.name, scale.dtype)
    if is_fp8:
        if len(values.shape) < 2:
            refuse("an FP8 weight must be (..., n, k)", str(values))
        _check_scale(scale, values, scale_shape(values.shape, (128, 128)), _SCALE_DTYPES)
        return Weight(values, AsFloat32(scale), stored)
    if len(values.shape) != 2 or values.shape[1] % (GROUP // 2):
        refuse("a packed FP4 weight must be (n, k / 2) with k a multiple of 32", str(values))
    rows, columns = values.shape
    _check_scale(scale, values, (rows, 2 * columns // GROUP), (_E8M0,))
    return Weight(RepackedValues(values, scale), RepackedScale(scale), stored)


def _check_scale(
    scale: StoredTensor,
    values: StoredTensor,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype, ...],
) -> None:
    """Raises ValueError unless a scale has the right dtype and shape, and plausible entries."""
    if scale.dtype not in dtypes:
        expected = " or ".join(dtype.name for dtype in dtypes)
        refuse(f"the scale of {values} must be {expected}", str(scale))
    if scale.shape != shape:
        then = "Only scale blocks of 128x128, and MXFP4's of 1x32, can be loaded."
        refuse(f"the scale of {values} must have the shape {list(shape)}", str(scale), then)
    entries = scale.read((slice(None),) * len(shape)).astype(np.float32)
    wrong = ~(np.isfinite(entries) & (entries > 0))
    if wrong.any():
        where = tuple(map(int, np.argwhere(wrong)[0]))
        got = f"{entries[where]} at {where} of {scale}"
        refuse("scales must be finite and positive", got, "Download the file again.")
    if entries.size and np.median(entries) > LARGEST_SCALE:
        got = f"a median of {np.median(entries):g} in {scale}"
        then = "This looks like the reciprocal: store amax / 448, not 448 / amax."
        refuse("real must be value * scale, with scales far below 1", got, then)
