"""Sources: arrays that are read slice by slice, made of the stored tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Index = tuple[slice, ...]


@runtime_checkable
class Source(Protocol):
    """An array that nobody holds: its shape and dtype, and how a slice of it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self, index: Index) -> np.ndarray: ...


@dataclass(frozen=True)
class AsFloat32:
    """A source in float32: exact for bfloat16 and float8_e8m0fnu."""

    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def read(self, index: Index) -> np.ndarray:
        return self.source.read(index).astype(np.float32)


@dataclass(frozen=True)
class Stack:
    """Matrices stacked along a new first dimension. Each is made of parts, one above the other."""

    matrices: tuple[tuple[Source, ...], ...]  # all of the same shapes

    @property
    def shape(self) -> tuple[int, ...]:
        parts = self.matrices[0]
        return len(self.matrices), sum(part.shape[0] for part in parts), parts[0].shape[1]

    @property
    def dtype(self) -> np.dtype:
        return self.matrices[0][0].dtype

    def read(self, index: Index) -> np.ndarray:
        ranges = [range(n)[cut] for n, cut in zip(self.shape, index, strict=True)]
        out = np.empty([len(r) for r in ranges], self.dtype)
        _, rows, columns = ranges
        for target, i in zip(out, ranges[0], strict=True):
            first = 0  # row of the part
            for part in self.matrices[i]:
                n = part.shape[0]
                begin, end = max(rows.start, first), min(rows.stop, first + n)
                if begin < end:
                    cut = slice(begin - first, end - first), slice(columns.start, columns.stop)
                    target[begin - rows.start : end - rows.start] = part.read(cut)
                first += n
        return out
