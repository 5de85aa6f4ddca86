"""Batches of bytes. Which bytes a step trains on depends on the seed and the step alone."""

import functools
import os
import pathlib
import zlib

import numpy as np

HELD_OUT = 20  # one window in so many is never trained on


class Text:
    """Windows of `length` + 1 bytes of a text, in an order that the seed gives to each epoch.

    It keeps no position: a run that goes on at a step gets the batches of one that never stopped.

    Args:
      path: a file or a folder of files. None: the Python standard library's sources.
      length, batch: the sizes of a batch, (batch, length + 1).
      seed: of the order.
    """

    def __init__(self, path: pathlib.Path | None, length: int, batch: int, seed: int):
        self.bytes = np.frombuffer(_read(path), np.uint8)
        self.length, self.batch, self.seed = length, batch, seed
        starts = np.arange((len(self.bytes) - 1) // length) * length
        is_held_out = np.arange(len(starts)) % HELD_OUT == HELD_OUT - 1
        self.starts, self.held_out = starts[~is_held_out], starts[is_held_out]
        if min(len(self.starts), len(self.held_out)) < batch:
            raise ValueError(
                f"the text must have {HELD_OUT * batch} windows of {length} bytes or more; got "
                f"{len(starts)}: take a longer text, or a smaller --batch"
            )
        self.checksum = zlib.crc32(self.bytes)
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def at(self, step: int) -> np.ndarray:
        """Returns the batch (batch, length + 1) int32 of a step, which counts from 0."""
        per_epoch = len(self.starts) // self.batch
        epoch, place = divmod(step, per_epoch)
        chosen = self._order(epoch)[place * self.batch :][: self.batch]
        return self._windows(self.starts[chosen])

    def to_evaluate(self, batches: int) -> list[np.ndarray]:
        """Returns up to `batches` batches that no step trains on, the same for every seed."""
        whole = min(batches, len(self.held_out) // self.batch) * self.batch
        return [self._windows(s) for s in self.held_out[:whole].reshape(-1, self.batch)]

    def _make_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.starts))

    def _windows(self, starts: np.ndarray) -> np.ndarray:
        return self.bytes[starts[:, None] + np.arange(self.length + 1)].astype(np.int32)


def _read(path: pathlib.Path | None) -> bytes:
    if path is not None and path.is_file():
        return path.read_bytes()
    folder = path or pathlib.Path(os.__file__).parent
    pattern = "**/*.py" if path is None else "**/*"
    # Installed packages differ from machine to machine; the standard library's own files do not.
    is_ours = lambda file: path is not None or "site-packages" not in file.parts
    files = (file for file in sorted(folder.glob(pattern)) if file.is_file() and is_ours(file))
    return b"".join(file.read_bytes() for file in files)
