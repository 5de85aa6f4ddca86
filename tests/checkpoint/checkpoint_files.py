"""Safetensors files written and read by hand; imports nothing of the package.

The format: the header's length (8 bytes, little endian), the header (JSON), the data.
"""

import json

import ml_dtypes
import numpy as np
import reference

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
BF16 = np.dtype(ml_dtypes.bfloat16)
CODES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16",
    "float32": "F32",
    "int8": "I8",
    "uint8": "U8",
    "int64": "I64",
    "int32": "I32",
}
DTYPES = {code: np.dtype(getattr(ml_dtypes, name, name)) for name, code in CODES.items()}


def header_of(tensors):
    header, offset = {}, 0
    for name, x in tensors.items():
        span = [offset, offset + x.nbytes]
        header[name] = {"dtype": CODES[x.dtype.name], "shape": list(x.shape), "data_offsets": span}
        offset += x.nbytes
    return header


def write(file, tensors, header=None, data=None):
    """Writes tensors to a file, with another header (a dict or bytes) or data if they are given."""
    header = header_of(tensors) if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = b"".join(x.tobytes() for x in tensors.values()) if data is None else data
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def write_shards(folder, *shards):
    """Writes each dict of tensors to a file of its own, and their index."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read(path):
    """Returns the tensors of a file, or of all files of a folder."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            x = np.frombuffer(content[start + begin : start + end], DTYPES[entry["dtype"]])
            assert name not in tensors
            tensors[name] = x.reshape(entry["shape"])
    return tensors


def assert_same_tensors(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, x in expected.items():
        reference.assert_same_bits(actual[name], x, name)


def quantized(name, n, k, seed=0, scale_dtype=np.float32, scale_name=None):
    """A random weight (n, k) in FP8 and its scale, as a file of DeepSeek-V3 names them."""
    x = np.random.default_rng([seed, n, k]).standard_normal((n, k), np.float32) / k**0.5
    values, scale = reference.quantize(x, (128, 128), pow2=scale_dtype == E8M0)
    scale = scale.astype(scale_dtype)
    return {name: values, scale_name or f"{name}_scale_inv": scale}


def experts(layer, num_experts, d, f):
    """The weights of a layer's experts, as DeepSeek-V3 names them."""
    tensors = {}
    for i in range(num_experts):
        for part, (n, k) in {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}.items():
            tensors |= quantized(f"{layer}.experts.{i}.{part}.weight", n, k, seed=i + len(part))
    return tensors


def dequantized(tensors, name):
    """The real (n, k) of a quantised weight, in float64."""
    scale = tensors[f"{name}_scale_inv"].astype(np.float32)
    return reference.dequantize(tensors[name], scale, (128, 128))
