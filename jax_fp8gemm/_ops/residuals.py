"""What a product keeps for its backward pass: under names for jax.checkpoint, and FP8 in words.

FP8 values are kept as uint32 arrays of four values each. A scan over layers stacks what is kept,
and fills the stack with zeros first. XLA's kernel for that stores four elements a thread, whatever
their size, so it fills words four times as fast (docs/experiments/scans.md). On a GPU the
conversions are bitcasts, which cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_fp8gemm._data import formats
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh

# For jax.checkpoint_policies.save_only_these_names: the residuals and the result.
CHECKPOINT_NAMES = ("fp8gemm_lhs", "fp8gemm_rhs", "fp8gemm_out")
_PER_WORD = 4  # FP8 values of a uint32

Tree = TypeVar("Tree")


@partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["dtype"])
@dataclass(frozen=True, eq=False)
class _Words:
    """FP8 values (..., 4 k), as uint32 (..., k)."""

    words: jax.Array
    dtype: np.dtype[Any] = field(metadata={"static": True})


def name_residual(name: str, tree: Any) -> Any:
    """Returns `tree` under its name of CHECKPOINT_NAMES: "lhs", "rhs" or "out".

    FP8 values that the caller has computed are in words then, which read_residuals undoes. Those of
    an operand should not be named: a scan has its operands already, but would stack their words.
    """
    assert f"fp8gemm_{name}" in CHECKPOINT_NAMES
    named = lambda leaf: checkpoint_name(leaf, f"fp8gemm_{name}")
    return jax.tree.map(named, jax.tree.map(_in_words, tree))


def read_residuals(tree: Tree) -> Tree:
    """Returns what the backward pass reads of a tree with named residuals."""
    is_words = lambda x: isinstance(x, _Words)
    return jax.tree.map(lambda x: _values(x) if is_words(x) else x, tree, is_leaf=is_words)


def _in_words(x: jax.Array) -> Any:
    is_fp8 = x.dtype in formats.FP8_DTYPES and x.ndim > 0
    # Over Explicit axes XLA would gather what both passes read twice.
    if not is_fp8 or x.shape[-1] % _PER_WORD or explicit_mesh(x) is not None:
        return x
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // _PER_WORD, _PER_WORD)
    return _Words(lax.bitcast_convert_type(groups, jnp.uint32), x.dtype)


def _values(x: _Words) -> jax.Array:
    groups = lax.bitcast_convert_type(x.words, x.dtype)
    return groups.reshape(*x.words.shape[:-1], x.words.shape[-1] * _PER_WORD)
