"""QuantizeArgs: the static arguments of all quantisers, and what their primitives share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray


class QuantizeArgs(TypedDict):
    """How an unchecked function quantises.

    Attributes:
      dtype: float8_e4m3fn or float8_e5m2.
      pow2_scale: whether each scale is rounded up to a power of two.
      implementation: None, "cuda", "xla" or "emulate".
    """

    dtype: DTypeLike
    pow2_scale: bool
    implementation: Implementation


def bind_args(mode: str, args: QuantizeArgs) -> dict[str, Any]:
    """Returns the keyword arguments with which a primitive is bound in this mode."""
    return dict(
        mode=mode,
        e5m2=jnp.dtype(args["dtype"]) == jnp.float8_e5m2,
        pow2_scale=bool(args["pow2_scale"]),
        implementation=args["implementation"],
    )


def scaled_arrays(results: Sequence[jax.Array]) -> tuple[ScaledArray, ...]:
    """Returns a ScaledArray with block (1, 128) for each pair of values and scale."""
    return tuple(map(ScaledArray, results[::2], results[1::2]))


def keep_used_axes(used, *, mode: str, **params) -> tuple[dict[str, Any], Sequence[int]]:
    """The dce_rule of primitives with the modes "row", "column" and "row_column".

    Where only rows, or only columns, of a "row_column" are used, it leaves out the others.
    """
    kept = range(len(used))
    if mode == "row_column" and not any(used[2:]):
        mode, kept = "row", (0, 1)
    elif mode == "row_column" and not any(used[:2]):
        mode, kept = "column", (2, 3)
    return dict(params, mode=mode), kept
