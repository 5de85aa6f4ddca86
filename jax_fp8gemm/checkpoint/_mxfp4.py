"""MXFP4 repacked to FP8: e2m1 values with a scale for each 32 become e4m3 with one for 128x128.

A byte holds two values of a row, the first in its low bits. The scale of a block is the largest of
its MXFP4 scales over 2^6, the largest power of two that keeps 6 * 2^6 within e4m3's 448. A value is
then exact unless its own scale is below 2^-14 of the largest in the block. This is the conversion
that DeepSeek publishes with V4 (inference/convert.py, --expert-dtype fp8).
OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 6.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from jax_fp8gemm._data.formats import SCALE_BLOCK, num_blocks
from jax_fp8gemm.checkpoint._sources import Index, Source

GROUP = 32  # values of a row that share a scale in MXFP4
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
_SMALLEST = np.float32(2.0**-126)  # the smallest normal f32


def _spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    rows = np.repeat(scale, block[0], axis=0)[: shape[0]]
    return np.repeat(rows, block[1], axis=1)[:, : shape[1]]


def _blocks(cut: slice, extent: int) -> range:
    """Returns the elements of the whole scale blocks that a slice touches."""
    wanted = range(extent)[cut]
    start = wanted.start // SCALE_BLOCK * SCALE_BLOCK
    return range(start, min(num_blocks(wanted.stop) * SCALE_BLOCK, extent))


def _block_scale(groups: np.ndarray) -> np.ndarray:
    """Returns the scale of each 128x128 block from those of each 1x32, both float32."""
    per_block = SCALE_BLOCK // GROUP
    rows, columns = groups.shape
    padded = np.pad(groups, ((0, -rows % SCALE_BLOCK), (0, -columns % per_block)))
    tiles = padded.reshape(num_blocks(rows), SCALE_BLOCK, num_blocks(columns * GROUP), per_block)
    return np.maximum(tiles.max(axis=(1, 3), initial=0) / 64, _SMALLEST)


@dataclass(frozen=True)
class RepackedScale:
    """The float32 scale (ceil(n / 128), ceil(k / 128)) of a repacked weight (n, k)."""

    groups: Source  # (n, k / 32) float8_e8m0fnu

    @property
    def shape(self) -> tuple[int, int]:
        rows, groups = self.groups.shape
        return num_blocks(rows), num_blocks(groups * GROUP)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def read(self, index: Index) -> np.ndarray:
        per_block = (SCALE_BLOCK, SCALE_BLOCK // GROUP)
        cuts = [range(n)[cut] for n, cut in zip(self.shape, index, strict=True)]
        groups = tuple(slice(r.start * b, r.stop * b) for r, b in zip(cuts, per_block, strict=True))
        return _block_scale(self.groups.read(groups).astype(np.float32))


@dataclass
class RepackedValues:
    """The e4m3 values of a repacked weight (n, k). It measures the error of what it has read."""

    packed: Source  # (n, k / 2), one byte for two values
    groups: Source
    _largest: float = field(default=0.0)
    _largest_error: float = field(default=0.0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(ml_dtypes.float8_e4m3fn)

    @property
    def error(self) -> float:
        """Returns the largest error over the largest magnitude; 0.0 is exact."""
        return self._largest_error / self._largest if self._largest_error else 0.0

    def read(self, index: Index) -> np.ndarray:
        rows, columns = (_blocks(cut, n) for cut, n in zip(index, self.shape, strict=True))
        cut = lambda per_item: (
            slice(rows.start, rows.stop),
            slice(columns.start // per_item, columns.stop // per_item),
        )
        packed, groups = self.packed.read(cut(2)).view(np.uint8), self.groups.read(cut(GROUP))
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(rows), len(columns))
        values = _E2M1[codes]
        groups = groups.astype(np.float32)
        block = _spread(_block_scale(groups), (SCALE_BLOCK, SCALE_BLOCK), values.shape)
        values *= _spread(groups, (1, GROUP), values.shape) / block
        repacked = values.astype(self.dtype)
        self._measure(values, repacked, block)
        inner = [
            slice(r.start - outer.start, r.stop - outer.start)
            for r, outer in zip(
                (range(n)[c] for c, n in zip(index, self.shape, strict=True)),
                (rows, columns),
                strict=True,
            )
        ]
        return np.array(repacked[tuple(inner)])

    def _measure(self, values: np.ndarray, repacked: np.ndarray, block: np.ndarray) -> None:
        largest = lambda x: float(np.max(np.abs(x) * block, initial=0))
        self._largest = max(self._largest, largest(values))
        error = largest(repacked.astype(np.float32) - values)
        self._largest_error = max(self._largest_error, error)
