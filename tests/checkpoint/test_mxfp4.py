"""MXFP4 of DeepSeek-V4's experts: repacked to FP8 with 128x128 blocks, and its error reported."""

import checkpoint_files as files
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm import checkpoint

E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)


def mxfp4(name, n, k, spread=3, seed=0):
    """A random weight of V4's experts, with scales from 2^(-6 - spread) to 2^-6, and its reals."""
    rng = np.random.default_rng([seed, n, k])
    codes = rng.integers(0, 16, (n, k), np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    exponents = rng.integers(121 - spread, 122, (n, k // 32), np.uint8)
    tensors = {f"{name}.weight": packed.view(np.int8), f"{name}.scale": exponents.view(files.E8M0)}
    scale = 2.0 ** (exponents.astype(int) - 127)
    return tensors, codes.view(E2M1).astype(np.float64) * np.repeat(scale, 32, axis=1)


@pytest.mark.parametrize("n, k", [(256, 256), (128, 32), (200, 416), (1, 128), (0, 64)])
def test_repacking_is_exact(tmp_path, n, k):
    tensors, real = mxfp4("a", n, k)
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    w = loaded.tensors["a.weight"]
    assert w.shape == (k, n) and w.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(w.dequantize(), np.float64).T, real)
    assert loaded.repack_errors == {"a.weight": 0.0}
    scale = np.asarray(w.T.scale)
    assert scale.shape == (-(-n // 128), -(-k // 128))
    assert (np.frexp(scale)[0] == 0.5).all()  # powers of two


def test_the_scale_is_the_largest_of_a_block_over_64(tmp_path):
    tensors, _ = mxfp4("a", 256, 256, spread=0)
    tensors["a.scale"].view(np.uint8)[130, 5] = 125  # of the block at row 1, column 1
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    expected = 2.0 ** (np.array([[121, 121], [121, 125]]) - 127) / 64
    np.testing.assert_array_equal(loaded.tensors["a.weight"].T.scale, expected)


def test_the_error_of_a_wide_range_is_reported(tmp_path):
    # Exact down to 2^-14 of the block's largest scale. 0.5 * 2^-15 is half of a step there: it
    # rounds to even, which is 0; 1.5 is a step and a half, and rounds to two.
    codes = np.full((128, 128), 7, np.uint8)  # 6.0
    codes[0, :32] = 1  # 0.5
    codes[1, :32] = 3  # 1.5
    exponents = np.full((128, 4), 120, np.uint8)
    tensors = {
        "a.weight": codes[:, 0::2] | codes[:, 1::2] << 4,
        "a.scale": exponents.view(files.E8M0),
    }
    for fall, error in ((14, 0.0), (15, 0.5 * 2.0**-15 / 6)):
        exponents[:2, 0] = 120 - fall
        loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
        assert loaded.repack_errors == {"a.weight": error}


def test_the_smallest_scales_give_normal_ones(tmp_path):
    codes = np.full((1, 128), 7, np.uint8)
    exponents = np.zeros((1, 4), np.uint8)  # 2^-127
    tensors = {"a.weight": codes[:, 0::2] | codes[:, 1::2] << 4}
    tensors["a.scale"] = exponents.view(files.E8M0)
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    w = loaded.tensors["a.weight"].T
    assert np.asarray(w.scale).item() == 2.0**-126
    np.testing.assert_array_equal(np.asarray(w.values, np.float64), 3.0)


def experts(num_experts, d, f):
    tensors, real = {}, {}
    for i in range(num_experts):
        for part, (n, k) in {"w1": (f, d), "w3": (f, d), "w2": (d, f)}.items():
            name = f"layers.0.ffn.experts.{i}.{part}"
            added, real[i, part] = mxfp4(name, n, k, seed=10 * i + int(part[1]))
            tensors |= added
    return tensors, real


def test_experts_are_stacked_and_cut_over_a_mesh(tmp_path):
    tensors, real = experts(4, 256, 256)
    file = files.write(tmp_path / "x.safetensors", tensors)
    mesh = jax.make_mesh((4, 2), ("expert", "f"))
    # halves of d are whole blocks; quarters of 256 are not
    for spec in (PartitionSpec("expert", "f"), PartitionSpec(None, "expert", "f")):
        rules = checkpoint.sharding_rules(mesh, [("experts", spec)])
        loaded = checkpoint.load(file, shardings=rules)
        gate_up, down = (loaded.tensors[f"layers.0.ffn.experts.w_{x}"] for x in ("gate_up", "down"))
        for i in range(4):
            both = np.concatenate([real[i, "w1"], real[i, "w3"]]).T
            np.testing.assert_array_equal(np.asarray(gate_up.dequantize(), np.float64)[i], both)
            down_i = np.asarray(down.dequantize(), np.float64)[i]
            np.testing.assert_array_equal(down_i, real[i, "w2"].T)
        assert loaded.repack_errors == dict.fromkeys(
            (name for name in tensors if name.endswith("weight")), 0.0
        )
        stored = PartitionSpec(spec[0], *reversed((*spec, None)[1:3]))  # transposed: d and f swap
        assert gate_up.transposed.sharding.is_equivalent_to(NamedSharding(mesh, stored), 3)


def test_repacked_weights_are_saved_in_fp8_with_powers_of_two(tmp_path):
    tensors, real = experts(2, 128, 128)
    loaded = checkpoint.load(files.write(tmp_path / "x.safetensors", tensors))
    checkpoint.save(tmp_path / "saved", loaded)
    saved = files.read(tmp_path / "saved")
    assert set(saved) == set(tensors)
    for (i, part), expected in real.items():
        name = f"layers.0.ffn.experts.{i}.{part}"
        values, scale = saved[f"{name}.weight"], saved[f"{name}.scale"]
        assert values.dtype == ml_dtypes.float8_e4m3fn and scale.dtype == files.E8M0
        np.testing.assert_array_equal(values.astype(float) * scale.astype(float), expected)
