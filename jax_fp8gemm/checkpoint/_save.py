"""save: writes a checkpoint in the layout that it was loaded from."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.formats import SCALE_BLOCK, num_blocks, scale_shape
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array
from jax_fp8gemm.checkpoint._checkpoint import Checkpoint, StoredScale
from jax_fp8gemm.checkpoint._experts import published_names
from jax_fp8gemm.checkpoint._orientation import as_stored
from jax_fp8gemm.checkpoint._placement import to_host
from jax_fp8gemm.checkpoint._stored import DTYPES, INDEX_NAME
from jax_fp8gemm.checkpoint._weights import LARGEST_SCALE

_OP = "checkpoint.save"
# What Hugging Face's transformers asks of every file.
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class _Output:
    """A tensor to write, and how its data comes to the host."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[], np.ndarray]
    is_scale: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    path: str | os.PathLike[str], checkpoint: Checkpoint, *, max_file_bytes: int = 5 * 10**9
) -> None:
    """Writes a checkpoint to safetensors files, in the layout that it was loaded from.

    What load has read and nobody changed is written with the same names, dtypes and bytes, its
    experts one by one, its scales in their own dtype. Weights that load repacked from MXFP4 are
    written as FP8, with float8_e8m0fnu scales of 128x128 blocks.

    Args:
      path: a folder, which is made if it is missing. It must hold no safetensors files.
      checkpoint: from load, or Checkpoint(tensors) with quantised weights (k, n).
      max_file_bytes: how many bytes of tensors a file holds, unless a single one is larger. The
        host holds those of one file at a time. Several files come with an index.
    Raises:
      ValueError: the folder holds safetensors files, two tensors have one name, an array has shards
        on other processes, a scale cannot be written exactly in the dtype it came in, or load would
        refuse it. Nothing is written then. Or max_file_bytes is not above 0.
      TypeError: what is no array, has a dtype that safetensors does not know, or a name that is no
        string.
      ModuleNotFoundError: safetensors is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{_OP} needs safetensors: pip install safetensors") from error

    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"{_OP}: checkpoint must be a Checkpoint; got {type(checkpoint).__name__}. "
            "Wrap a dictionary of tensors: Checkpoint(tensors)."
        )
    if not isinstance(max_file_bytes, numbers.Real):
        given = checks.short_repr(max_file_bytes)
        raise TypeError(f"{_OP}: max_file_bytes must be a number; got {given}")
    if not max_file_bytes > 0:
        raise ValueError(f"{_OP}: max_file_bytes must be above 0; got {max_file_bytes}")
    folder = Path(path)
    outputs = [o for name in checkpoint.tensors for o in _outputs(checkpoint, name)]
    _check_outputs(folder, outputs)
    files = _split(outputs, max_file_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for i, group in enumerate(files):
        file = "model.safetensors"
        if len(files) > 1:
            file = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        # NOTE: safetensors writes an array's memory, in whatever order that is.
        tensors = {o.name: np.require(o.fetch(), requirements="C") for o in group}
        save_file(tensors, folder / file, metadata=_METADATA)
        weight_map |= {o.name: file for o in group}
    if len(files) > 1:
        total = sum(o.nbytes for o in outputs)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _check_outputs(folder: Path, outputs: list[_Output]) -> None:
    present = sorted(folder.glob("*.safetensors*"))
    if present:
        raise ValueError(
            f"{_OP}: path must be a folder without safetensors files; got {present[0]}. "
            "Remove them, or choose another folder."
        )
    names = set[str]()
    for output in outputs:
        if output.name in names:
            raise ValueError(f"{_OP}: a name must stand for one tensor; got {output.name} twice")
        names.add(output.name)
    for output in outputs:
        if output.is_scale:
            output.fetch()  # raises for a scale that cannot be saved, before a file is written


def _split(outputs: list[_Output], max_file_bytes: int) -> list[list[_Output]]:
    files: list[list[_Output]] = [[]]
    room = max_file_bytes
    for output in outputs:
        if files[-1] and output.nbytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(output)
        room -= output.nbytes
    return files


def _outputs(checkpoint: Checkpoint, name: str) -> Iterator[_Output]:
    """Yields what is written for an entry of the checkpoint."""
    if not isinstance(name, str):
        raise TypeError(f"{_OP}: a name must be a string; got {checks.short_repr(name)}")
    if name == "__metadata__":
        raise ValueError(f"{_OP}: a name must not be that of a file's metadata; got {name!r}")
    tensor = checkpoint.tensors[name]
    if not isinstance(tensor, ScaledArray):
        checks.check_array(_OP, name, tensor)
        _check_leaf(name, tensor)
        yield _Output(name, tensor.shape, tensor.dtype, lambda: to_host(tensor))
        return
    check_scaled_array(_OP, name, tensor)
    if tensor.block != (SCALE_BLOCK, SCALE_BLOCK):
        raise ValueError(f"{_OP}: {name}.block must be (128, 128); got {tensor.block}")
    for leaf in jax.tree.leaves(tensor):
        _check_leaf(name, leaf)
    if name not in checkpoint.stacks and (tensor.ndim == 2 or name in checkpoint.scales):
        yield from _quantised(checkpoint, name, tensor)
        return
    names = checkpoint.stacks.get(name) or published_names(name, tensor.shape[0])
    _check_stack(name, tensor, names)
    for i, parts in enumerate(names):
        rows = tensor.shape[2] // len(parts)
        for j, part in enumerate(parts):
            yield from _quantised(checkpoint, part, tensor, i, slice(j * rows, (j + 1) * rows))


def _check_stack(name: str, tensor: ScaledArray, names: Sequence[Sequence[str]]) -> None:
    """Raises ValueError unless each expert has names, and each of its parts whole scale blocks."""
    num_experts, _, n = tensor.shape
    if not num_experts:
        raise ValueError(f"{_OP}: a stack must hold an expert; got {name} with none")
    num_parts = {len(row) for row in names}
    is_whole = num_parts <= {1} or n % (max(num_parts) * SCALE_BLOCK) == 0
    if len(names) == num_experts and len(num_parts) <= 1 and is_whole:
        return
    raise ValueError(
        f"{_OP}: a stack must have an entry of Checkpoint.stacks for each expert, and gate and up "
        f"must each have a multiple of {SCALE_BLOCK} columns, so that no scale block holds both; "
        f"got {name} {checks.short_type(tensor)} with {len(names)} entries of "
        f"{', '.join(map(str, sorted(num_parts)))} names. Split gate and up before they are "
        "quantised, and save them by names of their own."
    )


def _quantised(
    checkpoint: Checkpoint,
    name: str,
    tensor: ScaledArray,
    i: int | None = None,
    rows: slice | None = None,
) -> Iterator[_Output]:
    """Yields values and scale of a weight: of `tensor`, or of rows of its matrix i, (n, k)."""
    default = StoredScale(f"{name}_scale_inv", np.dtype(np.float32))
    stored = checkpoint.scales.get(name, default)
    *batch, k, n = tensor.shape
    rows = rows or slice(0, n)
    shape = (*(() if i is not None else batch), rows.stop - rows.start, k)
    blocks = slice(rows.start // SCALE_BLOCK, num_blocks(rows.stop))
    values = lambda: to_host(as_stored(tensor)[0], i)[..., rows, :]
    scale = lambda: to_host(as_stored(tensor)[1], i)[..., blocks, :]
    yield _Output(name, shape, tensor.dtype, values)
    yield _Output(
        stored.name,
        scale_shape(shape, (SCALE_BLOCK, SCALE_BLOCK)),
        stored.dtype,
        lambda: _exact_scale(scale(), stored),
        is_scale=True,
    )


def _exact_scale(scale: np.ndarray, stored: StoredScale) -> np.ndarray:
    """Returns the scale in its stored dtype.

    Raises ValueError unless that is exact, and load takes it.
    """
    if not np.all(np.isfinite(scale)):
        raise ValueError(
            f"{_OP}: a weight must be finite, and so its scales; got a scale that is not for "
            f"{stored.name}. A block with a NaN or an Inf has the scale NaN."
        )
    if scale.size and np.median(scale) > LARGEST_SCALE:
        raise ValueError(
            f"{_OP}: half of the scales of a weight must be at most {LARGEST_SCALE:g}, because "
            f"load takes larger ones for reciprocals; got a median of {np.median(scale):g} for "
            f"{stored.name}"
        )
    cast = scale.astype(stored.dtype)
    if not np.array_equal(cast.astype(np.float32), scale, equal_nan=True):
        raise ValueError(
            f"{_OP}: a scale must be exact in the dtype it is stored in; got {stored.name} in "
            f"{stored.dtype.name}. Change Checkpoint.scales, or quantise with pow2_scale=True for "
            "float8_e8m0fnu."
        )
    return cast


def _check_leaf(name: str, x: jax.Array | np.ndarray) -> None:
    """Raises unless a file can hold `x`, and this process has all of it."""
    if x.dtype not in [np.dtype(dtype) for dtype in DTYPES.values()]:
        raise TypeError(f"{_OP}: a tensor must have a dtype of safetensors; got {name} {x.dtype}")
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            f"{_OP}: all shards must be on this process; got {name} {checks.short_type(x)} on "
            "several. Gather it with jax.experimental.multihost_utils.process_allgather."
        )
