"""Checkpoint: what load returns and save takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jax_fp8gemm._data.scaled_array import ScaledArray


@dataclass(frozen=True)
class StoredScale:
    """How a file stores the scale of a weight.

    Attributes:
      name: the name of the scale's tensor.
      dtype: float32, bfloat16 or float8_e8m0fnu, a power of two.
    """

    name: str
    dtype: np.dtype


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The tensors of a checkpoint, and how a file stores them.

    `tensors` is a pytree for jit. To save changed weights, use dataclasses.replace(checkpoint,
    tensors=...). Checkpoint(tensors) alone is saved in the layout of DeepSeek-V3.

    Attributes:
      tensors: by published name. A quantised weight (n, k) of a file is a ScaledArray (k, n) with
        block (128, 128), the rhs of matmul(x, w). All other tensors are arrays, as stored. Stacked
        experts are named "<layer>.experts.w_gate_up" (E, d, 2 f) and "<layer>.experts.w_down"
        (E, f, d), as moe_layer takes them.
      scales: how the scale of a published weight is stored. Without an entry it is float32, and its
        name is that of the weight with "_scale_inv" behind it.
      stacks: for each stack the published names of its weights: one row an expert, with the gate's
        name before up's. Without an entry they are "<layer>.experts.<i>.gate_proj.weight" and so
        on.
      repack_errors: for each weight that was stored in MXFP4, the largest error of its FP8 values
        over its largest magnitude. 0.0 is exact. A process reports what it has read.
    """

    tensors: Mapping[str, jax.Array | np.ndarray | ScaledArray]
    scales: Mapping[str, StoredScale] = field(default_factory=dict)
    stacks: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    repack_errors: Mapping[str, float] = field(default_factory=dict)
