"""The configs of the kernels that copy rows: the attribute of one call, and the list of all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def attributes(k: int) -> dict[str, np.int32]:
    """Returns the attribute `config` of a call that copies rows of k bytes."""
    return dict(word_bytes=np.int32(16 if k % 16 == 0 else 1))


def kernel_configs() -> Iterator[dict[str, np.int32]]:
    """Yields one config for each kernel."""
    yield from map(attributes, (16, 1))
