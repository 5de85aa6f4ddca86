"""save: the bytes that load has read, and new checkpoints in the layout of DeepSeek-V3."""

import dataclasses
import json
import sys
from functools import partial

import checkpoint_files as files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises, without_annotation_checks
from safetensors import safe_open

from jax_fp8gemm import checkpoint, quantize

LAYER = "model.layers.0.mlp"
TENSORS = {
    **files.quantized("a.weight", 200, 300),
    **files.quantized("qwen.weight", 128, 384, scale_dtype=files.BF16),
    **files.quantized("v4.weight", 256, 128, scale_dtype=files.E8M0, scale_name="v4.scale"),
    **files.quantized("ct.weight", 128, 128, scale_name="ct.weight_scale"),
    **files.experts(LAYER, 3, 256, 128),
    "norm.weight": np.float32([1, np.nan, -0.0, np.inf]).astype(files.BF16),
    "tid2eid": np.int64([2**40 + 1, -1]),
    "scalar": np.float32(3).reshape(()),
    "empty": np.zeros((0, 4), np.int8),
}


@pytest.mark.parametrize("stack_experts", [True, False])
@pytest.mark.parametrize("max_file_bytes", [10**9, 100_000, 1])
def test_what_was_loaded_is_saved_bit_by_bit(tmp_path, stack_experts, max_file_bytes):
    file = files.write(tmp_path / "x.safetensors", TENSORS)
    loaded = checkpoint.load(file, stack_experts=stack_experts)
    folder = tmp_path / "saved" / "here"
    checkpoint.save(folder, loaded, max_file_bytes=max_file_bytes)
    files.assert_same_tensors(files.read(folder), TENSORS)
    sizes = [sum(x.nbytes for x in files.read(f).values()) for f in folder.glob("*.safetensors")]
    assert max(sizes) <= max(max_file_bytes, 256 * 256)
    assert sum(sizes) == sum(x.nbytes for x in TENSORS.values())


def test_several_files_have_an_index(tmp_path):
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", TENSORS))
    folder = tmp_path / "saved"
    checkpoint.save(folder, loaded, max_file_bytes=100_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in TENSORS.values())
    assert set(index["weight_map"]) == set(TENSORS)
    names = {f.name for f in folder.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == names
    assert names == {f"model-{i + 1:05}-of-{len(names):05}.safetensors" for i in range(len(names))}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "np") as opened:  # which checks the header too
            assert name in opened.keys()
            assert opened.metadata() == {"format": "pt"}
    again = checkpoint.load(folder)
    assert jax.tree.structure(again.tensors) == jax.tree.structure(loaded.tensors)


def test_new_weights_are_saved_as_deepseek_v3_does(tmp_path):
    key = jax.random.key(0)
    w = jax.random.normal(key, (256, 200))
    gate_up, down = jax.random.normal(key, (2, 384, 256)), jax.random.normal(key, (2, 128, 384))
    tensors = {
        "a.weight": quantize(w, block=(128, 128)),
        f"{LAYER}.experts.w_gate_up": quantize(gate_up, block=(128, 128), with_transpose=True),
        f"{LAYER}.experts.w_down": quantize(down, block=(128, 128)),
        "norm.weight": jnp.ones(4, jnp.bfloat16),
    }
    checkpoint.save(tmp_path, checkpoint.Checkpoint(tensors))
    expected = {"norm.weight": np.ones(4, files.BF16)}

    def expect(name, real):
        values, scale = reference.quantize(np.asarray(real).T, (128, 128))
        expected.update({name: values, f"{name}_scale_inv": scale})

    expect("a.weight", w)
    for i in range(2):
        expect(f"{LAYER}.experts.{i}.gate_proj.weight", gate_up[i, :, :128])
        expect(f"{LAYER}.experts.{i}.up_proj.weight", gate_up[i, :, 128:])
        expect(f"{LAYER}.experts.{i}.down_proj.weight", down[i])
    files.assert_same_tensors(files.read(tmp_path), expected)


def test_changed_weights_keep_their_layout(tmp_path):
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", TENSORS))
    new = quantize(jnp.ones((128, 256)), block=(128, 128), pow2_scale=True)
    changed = dataclasses.replace(loaded, tensors={"v4.weight": new})
    checkpoint.save(tmp_path / "saved", changed)
    saved = files.read(tmp_path / "saved")
    assert {name: x.dtype.name for name, x in saved.items()} == {
        "v4.weight": "float8_e4m3fn",
        "v4.scale": "float8_e8m0fnu",
    }
    inexact = quantize(jnp.full((128, 256), 1.1), block=(128, 128))
    changed = dataclasses.replace(loaded, tensors={"v4.weight": inexact})
    with pytest.raises(ValueError, match="must be exact .*; got v4.scale in float8_e8m0fnu. Cha"):
        checkpoint.save(tmp_path / "inexact", changed)


square_of = partial(quantize, block=(128, 128))
SQUARE = square_of(jnp.ones((128, 128)))
NO_EXPERTS = square_of(jnp.ones((0, 128, 128)))


def test_arrays_of_numpy_in_any_order(tmp_path):
    """A file holds what an array says, whatever its memory holds."""
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    square = square_of(jnp.arange(128 * 256.0).reshape(128, 256) / 128)
    on_host = jax.device_get(square)
    tensors = {
        "turned": w.T,
        "strided": w[:, ::2],
        "a.weight": on_host,
        "scalar": np.asarray(3, np.float32),
    }
    checkpoint.save(tmp_path / "x", checkpoint.Checkpoint(tensors))
    checkpoint.save(tmp_path / "y", checkpoint.Checkpoint(tensors | {"a.weight": square}))
    found = files.read(tmp_path / "x")
    np.testing.assert_array_equal(found["turned"], w.T)
    np.testing.assert_array_equal(found["strided"], w[:, ::2])
    files.assert_same_tensors(found, files.read(tmp_path / "y"))


EXPERTS = quantize(jnp.ones((2, 128, 512)), block=(128, 128))


@pytest.mark.parametrize(
    "experts, names, got",
    [
        # A scale block would hold the last columns of gate and the first of up.
        (quantize(jnp.ones((2, 128, 384)), block=(128, 128)), {}, "2,128,384.* 2 entries of 2"),
        (quantize(jnp.ones((2, 128, 129)), block=(128, 128)), {}, "2,128,129.* 2 entries of 2"),
        (EXPERTS, (("gate", "up"),), "2,128,512.* 1 entries of 2"),
        (EXPERTS, (("gate", "up"), ("all",)), "2,128,512.* 2 entries of 1, 2"),
    ],
)
def test_stacks_whose_parts_do_not_fit(tmp_path, experts, names, got):
    name = f"{LAYER}.experts.w_gate_up"
    saved = checkpoint.Checkpoint({name: experts}, stacks={name: names} if names else {})
    with pytest.raises(ValueError, match=f"so that no scale block holds both; got .*{got}"):
        checkpoint.save(tmp_path / "x", saved)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "tensors, error, message",
    [
        ({"a": quantize(jnp.ones((128, 128)))}, ValueError, r"block must be .* got \(1, 128\)"),
        ({"a": jnp.ones(2, jnp.complex64)}, TypeError, "dtype of safetensors; got a complex64"),
        ({"a": SQUARE, "a_scale_inv": jnp.ones(1)}, ValueError, "got a_scale_inv twice"),
        (
            {"a": quantize(jnp.ones((2, 128, 128)), block=(128, 128))},
            ValueError,
            'must be named "<layer>.experts.w_gate_up"',
        ),
        # What load refuses.
        ({"a": square_of(jnp.full((128, 128), jnp.nan))}, ValueError, "must be finite, .* a_scale"),
        (
            {"a": square_of(jnp.full((9, 128), 1e5))},
            ValueError,
            "median of 223.2.* for a_scale_inv",
        ),
        ({"experts.w_down": NO_EXPERTS}, ValueError, "an expert; got experts.w_down with none"),
        ({"__metadata__": jnp.ones(2)}, ValueError, "a file's metadata; got '__metadata__'"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tensors, error, message):
    with pytest.raises(error, match=message):
        checkpoint.save(tmp_path / "x", checkpoint.Checkpoint(tensors))
    assert not (tmp_path / "x").exists()


def test_a_folder_with_files_is_not_overwritten(tmp_path):
    saved = checkpoint.Checkpoint({"a": jnp.ones(2)})
    checkpoint.save(tmp_path, saved)
    before = files.read(tmp_path)
    with pytest.raises(ValueError, match="must be a folder without safetensors files; got .*model"):
        checkpoint.save(tmp_path, dataclasses.replace(saved, tensors={"a": jnp.zeros(2)}))
    files.assert_same_tensors(files.read(tmp_path), before)


def test_names_are_strings(tmp_path):
    with without_annotation_checks():
        saved = checkpoint.Checkpoint({3: jnp.ones(2)})
        with raises(TypeError, match="^checkpoint.save: a name must be a string; got 3$"):
            checkpoint.save(tmp_path, saved)


def test_a_file_must_hold_a_number_of_bytes(tmp_path):
    with (
        without_annotation_checks(),
        raises(TypeError, match="max_file_bytes must be a number; got None"),
    ):
        checkpoint.save(tmp_path, checkpoint.Checkpoint({}), max_file_bytes=None)
    with raises(ValueError, match="max_file_bytes must be above 0; got 0"):
        checkpoint.save(tmp_path, checkpoint.Checkpoint({}), max_file_bytes=0)


def test_a_dictionary_is_no_checkpoint(tmp_path):
    with raises(TypeError, match=r"^checkpoint.save: checkpoint must be a Checkpoint; got d"):
        checkpoint.save(tmp_path, {"w": jnp.ones((2, 2))})
    assert not list(tmp_path.iterdir())


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with raises(ModuleNotFoundError, match="needs safetensors: pip install safetensors"):
        checkpoint.save(tmp_path, checkpoint.Checkpoint(TENSORS))
