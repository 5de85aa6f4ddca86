"""load of wrong files: a sentence that names file and tensor, before anything is on a device."""

import json
import re

import checkpoint_files as files
import jax
import ml_dtypes
import numpy as np
import pytest
from errors import raises, without_annotation_checks
from jax.sharding import PartitionSpec as P

from jax_fp8gemm import checkpoint

GOOD = files.quantized("a.weight", 256, 256) | {"b": np.arange(6, dtype=np.float32)}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture(autouse=True)
def nothing_on_a_device(monkeypatch):
    placed = []
    monkeypatch.setattr("jax_fp8gemm.checkpoint._load.place", lambda *args: placed.append(args))
    yield
    assert not placed


def refused(path, *words, **options):
    with pytest.raises(ValueError, match="^checkpoint.load: .* must .*; got ") as error:
        checkpoint.load(path, **options)
    message = str(error.value)
    for word in words:
        assert word in message, message
    assert re.search(r"[^.]$|[a-z0-9)]\.$", message), message


def changed(name, **fields):
    """The header of GOOD with other fields of a tensor."""
    header = files.header_of(GOOD)
    header[name] = header[name] | fields
    return header


@pytest.mark.parametrize(
    "header, words",
    [
        (changed("b", dtype="F4"), ("dtype must be one of", "F4 of b")),
        (changed("b", dtype=None), ("dtype must be", "None of b")),
        (changed("b", dtype=[]), ("dtype must be", "[] of b")),
        (changed("b", shape=[7]), ("must span 28 bytes", "b float32[7]")),
        (changed("b", shape=[-6]), ("integers >= 0", "for b")),
        (changed("b", shape=6), ("for b",)),
        (changed("b", shape=[True]), ("integers >= 0", "for b")),
        (changed("b", data_offsets=[0, 24]), ("must not overlap", "b")),
        (changed("b", data_offsets=[65556, 65580]), ("without gaps", "4 bytes", "b")),
        (changed("b", data_offsets=[10**12, 10**12 + 24]), ("without gaps", "b")),
        (changed("b", data_offsets=[1]), ("data_offsets", "for b")),
        ({"b": 3}, ("data_offsets", "3 for b")),
        ([], ("JSON",)),
        (b"{", ("JSON",)),
        (b"\xff", ("JSON",)),
        (b'{"b": 1, "b": 2}', ("JSON", "the name b twice")),
        (b"[" * 100_000, ("JSON",)),
    ],
)
def test_wrong_headers(tmp_path, header, words):
    file = files.write(tmp_path / "x.safetensors", GOOD, header=header)
    refused(file, *words, "x.safetensors")


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_a_file_cut_off_in_its_header(tmp_path, size):
    file = files.write(tmp_path / "x.safetensors", GOOD)
    file.write_bytes(file.read_bytes()[:size])
    refused(file, "whole header", f"of {size} bytes", "x.safetensors")


def test_a_file_cut_off_in_its_data(tmp_path):
    file = files.write(tmp_path / "x.safetensors", GOOD)
    file.write_bytes(file.read_bytes()[:-1])
    refused(file, "all bytes", "b float32[6]", "cut off")
    file.write_bytes(file.read_bytes()[:-1000])
    refused(file, "all bytes", "a.weight float8_e4m3fn[256, 256]")


def test_bytes_behind_the_last_tensor(tmp_path):
    file = files.write(tmp_path / "x.safetensors", GOOD)
    file.write_bytes(file.read_bytes() + b"12")
    refused(file, "must end", "2 bytes behind b")


def with_scale(scale):
    return GOOD | {"a.weight_scale_inv": scale}


def scale_of(entry):
    return np.float32([[1e-3, 1e-3], [entry, 1e-3]])


@pytest.mark.parametrize(
    "tensors, words",
    [
        (
            {"a.weight": GOOD["a.weight"]},
            ("must have one scale", "no a.weight_scale_inv for a.weight float8"),
        ),
        (GOOD | {"a.scale": scale_of(1e-3)}, ("one scale", "a.scale")),
        (with_scale(np.ones((2, 1), np.float32)), ("shape [2, 2]", "[2, 1]", "128x128")),
        (with_scale(np.ones((256, 2), np.float32)), ("shape [2, 2]", "[256, 2]")),
        (with_scale(np.ones((2, 2), np.int32)), ("float32 or bfloat16", "int32[2, 2]")),
        (with_scale(scale_of(0)), ("finite and positive", "0.0 at (1, 0)")),
        (with_scale(scale_of(-1)), ("finite and positive", "-1.0 at (1, 0)")),
        (with_scale(scale_of(np.nan)), ("finite and positive", "nan at (1, 0)")),
        (with_scale(scale_of(np.inf)), ("finite and positive", "inf at (1, 0)")),
        (with_scale(1 / GOOD["a.weight_scale_inv"]), ("reciprocal", "median")),
        ({"v": np.zeros(3, E4M3), "v_scale": np.ones(1, np.float32)}, ("(..., n, k)", "v ")),
    ],
)
def test_wrong_scales(tmp_path, tensors, words):
    refused(files.write(tmp_path / "x.safetensors", tensors), *words, "x.safetensors")


def test_nan_of_e8m0(tmp_path):
    tensors = files.quantized("a.weight", 256, 256, scale_dtype=files.E8M0, scale_name="a.scale")
    tensors["a.scale"].view(np.uint8)[1, 1] = 255
    refused(files.write(tmp_path / "x.safetensors", tensors), "nan at (1, 1) of a.scale")


@pytest.mark.parametrize(
    "packed, scale, words",
    [
        ((128, 60), (128, 4), ("multiple of 32", "int8[128, 60]")),
        ((128,), (4,), ("multiple of 32", "int8[128]")),
        ((128, 64), (1, 1), ("shape [128, 4]", "[1, 1]")),
    ],
)
def test_wrong_mxfp4(tmp_path, packed, scale, words):
    tensors = {"a.weight": np.zeros(packed, np.int8), "a.scale": np.ones(scale, files.E8M0)}
    refused(files.write(tmp_path / "x.safetensors", tensors), *words)
    tensors["a.scale"] = np.ones((128, 4), np.float32)
    tensors["a.weight"] = np.zeros((128, 64), np.int8)
    refused(files.write(tmp_path / "x.safetensors", tensors), "float8_e8m0fnu", "a.scale float32")


def test_a_name_in_two_files(tmp_path):
    folder = files.write_shards(tmp_path / "x", GOOD, {"b": GOOD["b"]})
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "in one file", "b in", "00001-of", "00002-of")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda index: index["weight_map"].update(c="gone.safetensors"), ("c in gone", "missing")),
        (lambda index: index["weight_map"].update(b=next(iter(index["weight_map"].values()))), ()),
        (lambda index: index["weight_map"].update(c=3), ("weight_map", "index.json")),
        (lambda index: index.pop("weight_map"), ("weight_map", "index.json")),
    ],
)
def test_wrong_indices(tmp_path, change, words):
    folder = files.write_shards(tmp_path / "x", {"a": GOOD["b"]}, {"b": GOOD["b"]})
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    refused(folder, *(words or ("no tensor b", "00001-of")))
    file.write_text("{")
    refused(file, "must be JSON", "index.json")


def test_paths_without_files(tmp_path):
    refused(tmp_path, "a safetensors file or a folder", str(tmp_path))
    refused(tmp_path / "no", "a safetensors file or a folder", "no such path")


def test_the_name_of_a_model_on_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("deepseek-ai/DeepSeek-V3", "got deepseek-ai/DeepSeek-V3. ", "snapshot_download returns")


@pytest.mark.parametrize("shardings", [P("expert"), [("experts", P("expert"))]])
def test_shardings_that_are_no_rules(tmp_path, shardings):
    file = files.write(tmp_path / "x.safetensors", GOOD)
    words = "shardings must be a dict by name, a function", "PartitionSpec", "sharding_rules(mesh, "
    with without_annotation_checks():
        refused(file, *words, shardings=shardings)


@pytest.mark.parametrize(
    "rules, error, message",
    [
        ({"w": P("x")}, TypeError, r"rules must be a list of pairs .*; got dict"),
        ("wx", TypeError, r"rules must be a list of pairs .*; got str"),
        ([("w", "x")], TypeError, r"each rule must be .*; got \('w', 'x'\)"),
        ([("w", P("x"), 1)], TypeError, r"each rule must be .*; got \('w', P"),
        ([("(", P("x"))], ValueError, r"with a regular expression; got '\(', missing"),
        ([("w", P("y"))], ValueError, r"axes of the mesh, \('x',\); got P.* for 'w'"),
    ],
)
def test_wrong_rules_are_refused_before_anything_is_read(rules, error, message):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    message = f"^checkpoint.sharding_rules: .*{message}"
    with without_annotation_checks(), raises(error, match=message):
        checkpoint.sharding_rules(mesh, rules)


def test_rules_without_a_mesh_are_refused():
    message = "^checkpoint.sharding_rules: mesh must be a jax.sharding.Mesh; got None"
    with without_annotation_checks(), raises(TypeError, match=message):
        checkpoint.sharding_rules(None, [])


def test_a_sharding_of_no_tensor(tmp_path):
    file = files.write(tmp_path / "x.safetensors", GOOD)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    refused(file, "names of loaded tensors", "got a.weigth", shardings={"a.weigth": one, "b": one})


def test_names(tmp_path):
    file = files.write(tmp_path / "x.safetensors", GOOD)
    refused(file, "must be found", "'nothing'", names="nothing")
    refused(file, "regular expression", "'('", names="(")
    refused(file, "that is not the scale of another", "'scale_inv'", names="scale_inv")
    with without_annotation_checks():
        refused(file, "a string, or None", "['a']", names=["a"])


def test_numbered_files_of_which_one_is_missing(tmp_path):
    folder = files.write_shards(tmp_path / "x", *({name: GOOD["b"]} for name in "abc"))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "all files that their names count", "2 of 3", "model-00002-of-00003")
    # As DeepSeek-V3's files are named.
    files.write(tmp_path / "model-00001-of-000163.safetensors", GOOD)
    refused(tmp_path, "1 of 163", "without model-00002-of-000163.safetensors")


LAYER = "model.layers.0.mlp"


def without(tensors, part):
    return {name: x for name, x in tensors.items() if part not in name}


@pytest.mark.parametrize(
    "tensors, words",
    [
        (without(files.experts(LAYER, 3, 128, 128), "1.up"), ("0..2", f"{LAYER}.experts.1.up_pr")),
        (
            without(files.experts(LAYER, 3, 128, 128), "experts.0."),
            ("0..2", f"{LAYER}.experts.0.gate"),
        ),
        (files.experts(LAYER, 2, 128, 192), ("multiple of 128", "f=192")),
        (
            files.experts(LAYER, 2, 128, 128)
            | files.quantized(f"{LAYER}.experts.1.up_proj.weight", 256, 128),
            ("must be [128, 128]", "[256, 128] for", "experts.1.up_proj.weight"),
        ),
        (
            files.experts(LAYER, 1, 128, 128)
            | files.quantized(f"{LAYER}.experts.0.w1.weight", 128, 128),
            ("one kind", "w1"),
        ),
        (
            files.experts(LAYER, 1, 128, 128) | {f"{LAYER}.experts.w_down": np.float32([1])},
            ("must be free", f"{LAYER}.experts.w_down"),
        ),
    ],
)
def test_experts_that_cannot_be_stacked(tmp_path, tensors, words):
    refused(files.write(tmp_path / "x.safetensors", tensors), *words)
