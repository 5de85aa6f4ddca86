"""load onto a mesh: each device gets its slice of the file, and no host a whole tensor."""

import math
import tracemalloc

import checkpoint_files as files
import jax
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8gemm import checkpoint
from jax_fp8gemm.checkpoint import _stored

P = PartitionSpec
LAYER = "model.layers.0.mlp"


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(request.param,) * 2)


@pytest.fixture
def reads(monkeypatch):
    """(name, shape) of all that is read from the files."""
    found = []
    read = _stored.StoredTensor.read

    def recorded(self, index):
        out = read(self, index)
        found.append((self.name, out.shape))
        return out

    monkeypatch.setattr(_stored.StoredTensor, "read", recorded)
    return found


@pytest.mark.parametrize(
    "spec, scale_spec",
    [
        (P("x", "y"), P("x", "y")),  # shards of (k, n) are (128, 128)
        (P("y", "x"), P("y", None)),  # (256, 64): no whole block along n
        (P(("x", "y"), None), P(None, None)),  # (64, 256)
        (P(None, "y"), P(None, "y")),
        (P("y"), P("y", None)),
        (P(), P()),
    ],
)
def test_a_scale_is_cut_as_its_values_where_shards_hold_whole_blocks(
    tmp_path, mesh, spec, scale_spec
):
    tensors = files.quantized("a.weight", 256, 512)
    file = files.write(tmp_path / "x.safetensors", tensors)
    loaded = checkpoint.load(file, shardings={"a.weight": NamedSharding(mesh, spec)})
    w = loaded.tensors["a.weight"]
    assert w.shape == (512, 256)
    # What is stored is the transpose of w (k, n), and its scale.
    for stored, cut in ((w.transposed, spec), (w.scale, scale_spec)):
        of_rows, of_columns = (*cut, None, None)[:2]
        expected = NamedSharding(mesh, P(of_columns, of_rows))
        assert stored.sharding.is_equivalent_to(expected, 2)
    reference.assert_same_bits(w.T.values, tensors["a.weight"])
    reference.assert_same_bits(w.T.scale, tensors["a.weight_scale_inv"])
    checkpoint.save(tmp_path / "saved", loaded)
    files.assert_same_tensors(files.read(tmp_path / "saved"), tensors)


def test_each_device_reads_its_own_slice(tmp_path, mesh, reads):
    tensors = files.quantized("a.weight", 256, 512) | {"b": np.zeros((8, 6), np.float32)}
    file = files.write(tmp_path / "x.safetensors", tensors)
    rules = checkpoint.sharding_rules(mesh, [("weight$", P("x", "y")), ("b", P(("x", "y")))])
    checkpoint.load(file, shardings=rules)
    of = lambda name: [shape for read, shape in reads if read == name]
    assert of("a.weight") == [(128, 128)] * 8
    assert of("b") == [(1, 6)] * 8
    assert of("a.weight_scale_inv") == [(2, 4)] + [(1, 1)] * 8  # checked, then placed


def test_each_device_reads_its_own_experts(tmp_path, mesh, reads):
    tensors = files.experts(LAYER, 8, 256, 128)
    file = files.write(tmp_path / "x.safetensors", tensors)
    rules = checkpoint.sharding_rules(mesh, [("w_gate_up", P("x", "y")), ("w_down", P("x"))])
    loaded = checkpoint.load(file, shardings=rules)
    for i in range(8):
        of = lambda part, i=i: f"{LAYER}.experts.{i}.{part}.weight"
        # cut along d: two devices, each half of gate and of up
        for part in ("gate_proj", "up_proj"):
            assert [shape for name, shape in reads if name == of(part)] == [(128, 128)] * 2
        assert [shape for name, shape in reads if name == of("down_proj")] == [(256, 128)] * 2
    checkpoint.save(tmp_path / "saved", loaded)
    files.assert_same_tensors(files.read(tmp_path / "saved"), tensors)


def test_gate_and_up_cut_across_their_border(tmp_path, mesh):
    tensors = files.experts(LAYER, 2, 128, 384)  # 2 f = 768; quarters of 192
    file = files.write(tmp_path / "x.safetensors", tensors)
    rules = checkpoint.sharding_rules(mesh, [("w_gate_up", P(None, None, "x"))])
    loaded = checkpoint.load(file, shardings=rules)
    assert loaded.tensors[f"{LAYER}.experts.w_gate_up"].scale.sharding.is_fully_replicated
    checkpoint.save(tmp_path / "saved", loaded)
    files.assert_same_tensors(files.read(tmp_path / "saved"), tensors)


def test_the_host_holds_one_shard_at_a_time(tmp_path, monkeypatch):
    mesh = jax.make_mesh((8,), ("x",))
    n, k = 1024, 8192
    tensors = files.quantized("a.weight", n, k)
    file = files.write(tmp_path / "x.safetensors", tensors)
    # On a CPU an array lives in the host memory that was read. Here what was read is dropped.
    largest = 0

    def drop(shape, sharding, read, dtype):
        nonlocal largest
        for index in sharding.addressable_devices_indices_map(shape).values():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            assert read(index).shape == sharding.shard_shape(shape)
            largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
        return jax.numpy.zeros(shape, dtype)

    monkeypatch.setattr(jax, "make_array_from_callback", drop)
    tracemalloc.start()
    try:
        checkpoint.load(file, shardings={"a.weight": NamedSharding(mesh, P("x"))})
    finally:
        tracemalloc.stop()
    assert n * k // 8 <= largest < 1.05 * n * k // 8


def test_devices_hold_one_byte_a_weight(tmp_path, mesh):
    tensors = files.experts(LAYER, 4, 256, 256)
    file = files.write(tmp_path / "x.safetensors", tensors)
    rules = checkpoint.sharding_rules(mesh, [("experts", P("x", "y"))])
    loaded = checkpoint.load(file, shardings=rules)
    held = [x for x in jax.tree.leaves(loaded.tensors) if x.dtype.itemsize == 1]
    for device in mesh.devices.flat:
        shards = [s.data.nbytes for x in held for s in x.addressable_shards if s.device == device]
        assert sum(shards) == 4 * 3 * 256 * 256 // 8
    assert sum(math.prod(x.shape) for x in held) == 4 * 3 * 256 * 256


@pytest.mark.parametrize(
    "spec, words",
    [
        (P("y", "x"), r"evenly; got \[384, 130\] cut into \[2, 4\] for a.weight"),
        (P(None, None, "x"), "an entry for each dimension; got .* for a.weight"),
    ],
)
def test_shardings_that_do_not_fit(tmp_path, mesh, spec, words, reads):
    tensors = files.quantized("a.weight", 130, 384)
    file = files.write(tmp_path / "x.safetensors", tensors)
    with pytest.raises(ValueError, match=f"^checkpoint.load: a sharding must .*{words}"):
        checkpoint.load(file, shardings={"a.weight": NamedSharding(mesh, spec)})
    assert {name for name, _ in reads} == {"a.weight_scale_inv"}
