"""load: reads a published FP8 checkpoint onto devices."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jax_fp8gemm._data import checks
from jax_fp8gemm.checkpoint._checkpoint import Checkpoint
from jax_fp8gemm.checkpoint._experts import stack_experts as stack
from jax_fp8gemm.checkpoint._mxfp4 import RepackedValues
from jax_fp8gemm.checkpoint._placement import (
    Shardings,
    check_names,
    check_shardings,
    find_sharding,
    place,
)
from jax_fp8gemm.checkpoint._stored import find_tensors, refuse
from jax_fp8gemm.checkpoint._weights import Weight, make_weights


def load(
    path: str | os.PathLike[str],
    *,
    names: str | None = None,
    shardings: Shardings = None,
    stack_experts: bool = True,
) -> Checkpoint:
    """Reads a published FP8 checkpoint onto devices, each shard straight from the files.

    It knows the layouts of DeepSeek-V3, R1 and V4, Kimi K2, Qwen3-FP8 and compressed-tensors' FP8
    blocks; docs/checkpoints.md has the table. FP8 values and scales are taken as they are. MXFP4,
    as of V4's experts, is repacked to FP8 with 128x128 blocks. Headers, sizes, the index and all
    scales are checked before anything is put on a device. A process reads the bytes of its own
    devices' shards only, besides headers and scales.

    Args:
      path: a safetensors file, a model.safetensors.index.json, or a folder with such an index or of
        files without one.
      names: a regular expression; only tensors in whose published name it is found are loaded. The
        scale of a weight comes with it. None loads all.
      shardings: where each loaded tensor lies: a dict by name, a function of name and shape, such
        as sharding_rules returns, or None. A NamedSharding is that of the loaded tensor, so of a
        quantised weight (k, n). Tensors without one lie on the first device. A scale is cut as its
        values where shards are multiples of 128, and else replicated.
      stack_experts: whether the quantised experts of a layer become w_gate_up (E, d, 2 f) and
        w_down (E, f, d). f must be a multiple of 128. False leaves each weight by itself.
    Returns:
      A Checkpoint. 64-bit tensors stay NumPy arrays unless jax_enable_x64 is set.
    Raises:
      ValueError: a file is missing, wrong or cut off, a scale is missing or wrong, a format is not
        known, shardings is none of the above, or with names=None a dict with the name of no loaded
        tensor, a sharding does not fit, or no name is found. The message names the file and the
        tensor.
    """
    check_shardings(shardings)
    if names is not None and not isinstance(names, str):
        refuse("names must be a regular expression, a string, or None", checks.short_repr(names))
    tensors = find_tensors(Path(path))
    try:
        chosen = {name for name in tensors if names is None or re.search(names, name)}
    except re.error as error:
        refuse("names must be a regular expression", f"{names!r}, {error}")
    weights = make_weights(tensors, chosen)
    if not weights:
        given = "no tensor" if names is None else repr(names)
        must = "names must be found in the name of a tensor that is not the scale of another"
        refuse(must, f"{given} for {path}")
    loose, stacks = weights, {}
    if stack_experts:
        loose, stacks = stack(weights)
    if names is None:
        check_names(shardings, loose)
    found = {name: find_sharding(shardings, name, weight) for name, weight in loose.items()}
    return Checkpoint(
        tensors={name: place(weight, name, found[name]) for name, weight in loose.items()},
        scales={name: w.stored_scale for name, w in weights.items() if w.stored_scale is not None},
        stacks=stacks,
        repack_errors=dict(_repack_errors(weights)),
    )


def _repack_errors(weights: Mapping[str, Weight]) -> Iterator[tuple[str, float]]:
    for name, weight in weights.items():
        if isinstance(weight.values, RepackedValues):
            yield name, weight.values.error
