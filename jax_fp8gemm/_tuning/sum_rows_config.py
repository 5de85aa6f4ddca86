"""The configs of the kernels that add rows: the attribute of one call, and the list of all."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

# Mirrors kSumRowsInputs in ffi/sum_rows/sum_rows_config.h.
DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


def attributes(dtype: np.dtype, k: int) -> dict[str, np.int32]:
    """Returns the attribute `config` of a call that adds rows of k elements of `dtype`."""
    word_bytes = 16 if k * dtype.itemsize % 16 == 0 else dtype.itemsize
    return dict(input=np.int32(DTYPES.index(dtype)), word_bytes=np.int32(word_bytes))


def kernel_configs() -> Iterator[dict[str, np.int32]]:
    """Yields one config for each kernel."""
    for dtype in DTYPES:
        yield from (attributes(dtype, k) for k in (8, 1))
