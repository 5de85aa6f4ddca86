"""Orientation: a file holds a weight as (n, k), and matmul(x, w) takes it as (k, n)."""

from __future__ import annotations

import jax
import numpy as np

from jax_fp8gemm._data.scaled_array import ScaledArray


def as_operand(values: jax.Array, scale: jax.Array) -> ScaledArray:
    """Returns stored values (..., n, k) and their scale as a ScaledArray (..., k, n)."""
    return ScaledArray(values, scale, None, (128, 128)).T


def as_stored(
    operand: ScaledArray,
) -> tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]:
    """Returns the values (..., n, k) and the scale that a file holds of `operand` (..., k, n)."""
    stored = operand.T
    if stored.values is not None:
        return stored.values, stored.scale
    assert stored.transposed is not None  # an array stores one orientation at least
    return stored.transposed.mT, stored.scale.mT
