"""The tensors of safetensors files, found by their headers and read by slices.

The package safetensors reads no FP8 into NumPy (0.8.0), and its errors name no tensor. A file is
the length of its header (8 bytes, little endian), the header (JSON), then the data.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from jax_fp8gemm._data import checks

INDEX_NAME = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


class _WrongJsonError(Exception):
    """JSON that is no object, or holds a name twice."""


def refuse(must_hold: str, got: str, then: str = "") -> NoReturn:
    """Raises ValueError with the sentence of every error of load."""
    raise ValueError(f"checkpoint.load: {must_hold}; got {got}{'. ' if then else ''}{then}")


_DOWNLOAD = "Download the file again."
_NO_PATH = (
    "There is no such path. A model on the Hugging Face Hub must be downloaded first: load the "
    "folder that huggingface_hub.snapshot_download returns."
)
# Of _strict_json: text that is no UTF-8, no JSON, or nested beyond Python's depth.
_NO_JSON = (UnicodeDecodeError, json.JSONDecodeError, RecursionError, _WrongJsonError)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: where its bytes are."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of the first byte, in the file

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a slice, copied from the file. Only its pages are read."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)[index]
        mapped = np.memmap(self.file, np.uint8, "r", self.offset, (self._nbytes,))
        whole = mapped.view(np.ndarray).view(self.dtype).reshape(self.shape)
        # NOTE: jax.Array may share memory with what it is given, and files may change.
        return np.array(whole[index])

    @property
    def _nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.name}{list(self.shape)} in {self.file}"


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a file, of the files of an index, or of all files of a folder.

    Raises ValueError unless headers, sizes and the index are right.
    """
    if path.is_file() and not path.name.endswith(".json"):
        return _file_tensors(path)
    index = path if path.is_file() else path / INDEX_NAME
    if index.is_file():
        return _indexed_tensors(index)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        then = "" if path.exists() else _NO_PATH
        refuse("path must be a safetensors file or a folder of them", str(path), then)
    _check_numbered(files)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _file_tensors(file).items():
            if name in tensors:
                got = f"{name} in {tensors[name].file} and in {file}"
                refuse("a tensor must be in one file", got, f"Remove one, or add {INDEX_NAME}.")
            tensors[name] = tensor
    return tensors


def _check_numbered(files: Sequence[Path]) -> None:
    """Raises ValueError unless files whose names count them, "-00001-of-00002", are all there."""
    texts: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for file in files:
        if match := _NUMBERED.fullmatch(file.name):
            texts[match[1], match[3]].append(match[2])
    for (start, total), found in texts.items():
        missing = set(range(1, int(total) + 1)) - set(map(int, found))
        if missing:
            width = min(map(len, found))
            name = f"{start}-{min(missing):0{width}}-of-{total}.safetensors"
            got = f"{len(found)} of {int(total)} files, without {name}, in {files[0].parent}"
            then = "Add the others, or load one file by its own path."
            refuse("a folder must hold all files that their names count", got, then)


def _indexed_tensors(index: Path) -> dict[str, StoredTensor]:
    must = 'the index must be JSON with a "weight_map" of tensor names to files'
    try:
        weight_map = _strict_json(index.read_bytes())["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            refuse(must, f"a file that is no text in {index}")
    except (KeyError, TypeError, AttributeError, *_NO_JSON) as error:
        refuse(must, f"{type(error).__name__} {error} in {index}")
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, file in weight_map.items():
        if file not in found:
            if not (index.parent / file).is_file():
                got = f"{name} in {file}, which is missing, in {index}"
                refuse("the index must name files that exist", got, "Download that file.")
            found[file] = _file_tensors(index.parent / file)
        if name not in found[file]:
            got = f"no tensor {name} in {index.parent / file}"
            refuse("a file must hold the tensors that the index names", got, _DOWNLOAD)
    return {name: found[file][name] for name, file in weight_map.items()}


def _strict_json(data: bytes) -> dict[str, Any]:
    """Returns the parsed JSON object. Raises one of _NO_JSON unless it holds each name once."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise _WrongJsonError(f"the name {name} twice")
            found[name] = value
        return found

    parsed = json.loads(data, object_pairs_hook=unique)
    if not isinstance(parsed, dict):
        raise _WrongJsonError(f"a {type(parsed).__name__}")
    return parsed


def _file_tensors(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file, in the order of their bytes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            got = f"{file} of {size} bytes"
            refuse("a safetensors file must begin with its whole header", got, _DOWNLOAD)
        text = stream.read(length)
    try:
        header = _strict_json(text)
    except _NO_JSON as error:
        refuse("a header must be JSON with each name once", f"{error} in {file}", _DOWNLOAD)
    header.pop("__metadata__", None)
    spans = [_parse(file, 8 + length, name, entry) for name, entry in header.items()]
    spans.sort(key=lambda span: (span[1], span[2]))
    _check_cover(file, size, 8 + length, spans)
    return {tensor.name: tensor for tensor, _, _ in spans}


Span = tuple[StoredTensor, int, int]


def _parse(file: Path, start: int, name: str, entry: Any) -> Span:
    """Returns a tensor of a header, and where its bytes begin and end in the file."""
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_whole = all(type(x) is int and x >= 0 for x in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        code, shape, begin, end, is_whole = None, (), 0, 0, False
    if not is_whole:
        must = "a tensor's header must hold dtype, shape and data_offsets, of integers >= 0"
        refuse(must, f"{checks.short_repr(entry)} for {name} in {file}", _DOWNLOAD)
    if not isinstance(code, str) or code not in DTYPES:
        refuse(f"a dtype must be one of {', '.join(DTYPES)}", f"{code} of {name} in {file}")
    dtype = np.dtype(DTYPES[code])
    tensor = StoredTensor(name, file, dtype, tuple(shape), start + begin)
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        got = f"data_offsets [{begin}, {end}] for {tensor}"
        refuse(f"data_offsets must span {expected} bytes", got, _DOWNLOAD)
    return tensor, start + begin, start + end


def _check_cover(file: Path, size: int, start: int, spans: list[Span]) -> None:
    """Raises ValueError unless the tensors cover the file's data, each byte once."""
    last = None
    for tensor, begin, end in spans:
        if begin < start:
            refuse("tensors must not overlap", f"{tensor}, which begins in {last}", _DOWNLOAD)
        if begin > start:
            got = f"{begin - start} bytes of no tensor before {tensor}"
            refuse("tensors must follow each other without gaps", got, _DOWNLOAD)
        if end > size:
            got = f"{tensor}, which ends at byte {end} of {size}"
            refuse("a file must hold all bytes of its tensors", got, f"It is cut off. {_DOWNLOAD}")
        start, last = end, tensor
    if start != size:
        got = f"{size - start} bytes behind {last or 'the header'} in {file}"
        refuse("a file must end with its last tensor", got, _DOWNLOAD)
