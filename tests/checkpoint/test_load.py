"""load: every published layout, its values exact, and experts stacked as moe_mlp takes them."""

import subprocess
import sys

import checkpoint_files as files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference

from jax_fp8gemm import ScaledArray, checkpoint, matmul
from jax_fp8gemm.moe import moe_mlp

LAYER = "model.layers.0.mlp"


def assert_holds(actual, values, scale):
    """A ScaledArray (..., k, n) of a file's values (..., n, k) and scale, bit by bit."""
    assert isinstance(actual, ScaledArray) and actual.block == (128, 128)
    assert actual.shape == (*values.shape[:-2], *values.shape[:-3:-1])
    stored = actual.T
    reference.assert_same_bits(stored.values, values)
    reference.assert_same_bits(stored.scale, scale.astype(np.float32))


def test_deepseek_v3_is_taken_as_it_is(tmp_path):
    # ragged last blocks along n and k, as kv_a_proj_with_mqa (576, 7168) has
    tensors = files.quantized("a.weight", 200, 300) | {
        "norm.weight": np.arange(5).astype(files.BF16),
        "gate.e_score_correction_bias": np.float32([1, 2]),
    }
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    assert set(loaded.tensors) == {"a.weight", "norm.weight", "gate.e_score_correction_bias"}
    assert_holds(loaded.tensors["a.weight"], tensors["a.weight"], tensors["a.weight_scale_inv"])
    reference.assert_same_bits(loaded.tensors["norm.weight"], tensors["norm.weight"])
    assert loaded.repack_errors == {}


@pytest.mark.parametrize(
    "weight, scale, dtype",
    [
        ("a.weight", "a.weight_scale_inv", files.BF16),  # Qwen3-FP8
        ("a.weight", "a.weight_scale", files.BF16),  # compressed-tensors
        ("a.weight", "a.scale", files.E8M0),  # DeepSeek-V4
    ],
)
def test_other_scales_become_float32_exactly(tmp_path, weight, scale, dtype):
    tensors = files.quantized(weight, 256, 384, scale_dtype=dtype, scale_name=scale)
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    assert_holds(loaded.tensors[weight], tensors[weight], tensors[scale])
    assert loaded.scales == {weight: checkpoint.StoredScale(scale, np.dtype(dtype))}


def test_every_e8m0_scale_is_its_power_of_two(tmp_path):
    codes = np.arange(128, dtype=np.uint8).reshape(1, 128)  # 2^-127 .. 2^0
    values = np.ones((1, 128 * 128), ml_dtypes.float8_e4m3fn)
    tensors = {"a.weight": values, "a.scale": codes.view(files.E8M0)}
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    scale = np.asarray(loaded.tensors["a.weight"].T.scale, np.float64)
    np.testing.assert_array_equal(scale[0], 2.0 ** np.arange(-127, 1))


def test_a_loaded_weight_is_the_rhs_of_matmul(tmp_path):
    tensors = files.quantized("a.weight", 256, 384)
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    x = np.random.default_rng(0).standard_normal((8, 384), np.float32)
    out = matmul(jnp.asarray(x), loaded.tensors["a.weight"])
    expected = reference.fake_quantize(x) @ files.dequantized(tensors, "a.weight").T
    assert np.abs(np.asarray(out, np.float64) - expected).max() <= 3e-6 * np.abs(expected).max()


def test_shards_with_and_without_an_index_give_the_same(tmp_path):
    first = files.quantized("a.weight", 128, 128)
    values, scale = dict([first.popitem()]), {"b": np.int32([1, 2, 3])}  # a scale in another file
    folder = files.write_shards(tmp_path / "indexed", first, values | scale)
    indexed = checkpoint.load(folder)
    (folder / "model.safetensors.index.json").rename(tmp_path / "index.json")
    loose = checkpoint.load(str(folder))
    assert set(indexed.tensors) == {"a.weight", "b"}
    same = jax.tree.map(lambda x, y: bool((x == y).all()), indexed.tensors, loose.tensors)
    assert all(jax.tree.leaves(same))


def test_names_chooses_weights_with_their_scales(tmp_path):
    tensors = files.quantized("layers.1.a.weight", 128, 128)
    tensors |= files.quantized("layers.11.a.weight", 128, 128) | {"head": np.float32([0])}
    file = files.write(tmp_path / "x.safetensors", tensors)
    assert set(checkpoint.load(file, names=r"^layers\.1\.").tensors) == {"layers.1.a.weight"}
    del tensors["layers.11.a.weight_scale_inv"]  # what is not chosen may be of any format
    file = files.write(tmp_path / "y.safetensors", tensors)
    assert set(checkpoint.load(file, names="head").tensors) == {"head"}


def test_experts_are_stacked_as_moe_mlp_takes_them(tmp_path):
    d, f, num_experts = 256, 128, 3
    tensors = files.experts(LAYER, num_experts, d, f)
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors)).tensors
    gate_up, down = (loaded[f"{LAYER}.experts.{name}"] for name in ("w_gate_up", "w_down"))
    assert set(loaded) == {f"{LAYER}.experts.w_gate_up", f"{LAYER}.experts.w_down"}
    assert gate_up.shape == (num_experts, d, 2 * f) and down.shape == (num_experts, f, d)
    of = lambda i, part: f"{LAYER}.experts.{i}.{part}.weight"
    stack = lambda suffix, *parts: np.stack(
        [np.concatenate([tensors[of(i, part) + suffix] for part in parts]) for i in range(3)]
    )
    for actual, parts in ((gate_up, ("gate_proj", "up_proj")), (down, ("down_proj",))):
        assert_holds(actual, stack("", *parts), stack("_scale_inv", *parts))
    x = np.random.default_rng(0).standard_normal((6, d), np.float32)
    out = moe_mlp(jnp.asarray(x), gate_up, down, jnp.int32([1, 2, 3]))
    expected = []
    for i, rows in enumerate((x[:1], x[1:3], x[3:])):
        real = lambda part, i=i: files.dequantized(tensors, of(i, part)).T
        x_fq = reference.fake_quantize(rows)
        gate, up = x_fq @ real("gate_proj"), x_fq @ real("up_proj")
        h = np.float32(gate / (1 + np.exp(-gate)) * up)
        expected.append(reference.fake_quantize(h) @ real("down_proj"))
    # An f32 sum in another order may round a value of h to its FP8 neighbour.
    assert reference.calc_diff(out, np.concatenate(expected)) < 1e-6


def test_experts_stay_apart_where_asked_to_or_unquantised(tmp_path):
    tensors = files.experts(LAYER, 2, 128, 128)
    file = files.write(tmp_path / "x.safetensors", tensors)
    assert len(checkpoint.load(file, stack_experts=False).tensors) == 6
    bf16 = {name: np.zeros((4, 4), files.BF16) for name in tensors if name.endswith("weight")}
    loaded = checkpoint.load(files.write(tmp_path / "bf16.safetensors", bf16))
    assert set(loaded.tensors) == set(bf16)


def test_64_bits_are_kept(tmp_path):
    tensors = {"tid2eid": np.int64([2**40 + 1, -1])}
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    reference.assert_same_bits(loaded.tensors["tid2eid"], tensors["tid2eid"])


def test_empty_and_scalar_tensors(tmp_path):
    tensors = {"empty": np.zeros((0, 4), np.float32), "scalar": np.float32(3).reshape(())}
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    for name, x in tensors.items():
        reference.assert_same_bits(loaded.tensors[name], x)


def test_what_is_loaded_does_not_change_with_the_file(tmp_path):
    tensors = {"a": np.arange(1024, dtype=np.float32)}
    file = files.write(tmp_path / "x.safetensors", tensors)
    loaded = checkpoint.load(file)
    with file.open("r+b") as stream:
        stream.seek(-4096, 2)
        stream.write(bytes(4096))
    reference.assert_same_bits(loaded.tensors["a"], tensors["a"])


def test_the_package_imports_neither_checkpoint_nor_safetensors():
    program = "import sys, jax_fp8gemm; print([m for m in sys.modules if 'safetensors' in m])"
    program += "; assert 'jax_fp8gemm.checkpoint' not in sys.modules"
    program += "; import jax_fp8gemm.checkpoint; assert 'safetensors' not in sys.modules"
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "[]\n", run.stderr
