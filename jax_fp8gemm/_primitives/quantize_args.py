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
    """How an unchecked function quantises."""

    dtype: DTypeLike
    pow2_scale: bool
    implementation: Implementation


def bind_args(mode: str, args: QuantizeArgs) -> dict[str, Any]:
    """`args` as the primitives take them."""
    return dict(
        mode=mode,
        e5m2=jnp.dtype(args["dtype"]) == jnp.float8_e5m2,
        pow2_scale=bool(args["pow2_scale"]),
        implementation=args["implementation"],
    )


def scaled_arrays(results: Sequence[jax.Array]) -> tuple[ScaledArray, ...]:
    """One ScaledArray with block (1, 128) for each pair of values and scale."""
    return tuple(map(ScaledArray, results[::2], results[1::2]))


def keep_used_axes(used, *, mode: str, **params) -> tuple[dict[str, Any], Sequence[int]]:
    """dce_rule of what has a mode "row_column": along one axis only, where that is enough."""
    kept = range(len(used))
    if mode == "row_column" and not any(used[2:]):
        mode, kept = "row", (0, 1)
    elif mode == "row_column" and not any(used[:2]):
        mode, kept = "column", (2, 3)
    return dict(params, mode=mode), kept
