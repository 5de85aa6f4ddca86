"""The benchmarks on all GPUs: the bytes that a program moves, and that they run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_fp8gemm
from jax_fp8gemm import _ffi, bench
from jax_fp8gemm.bench import _cli, _fsdp, _mesh, _timer

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")

TINY = _fsdp.Stack("tiny", 1, hidden=256, inter=512, tokens=128, loop="unrolled")
FP8 = ("f16", 2) if jax.default_backend() == "cpu" else ("f8e4m3fn", 1)  # as XLA gathers it

PROGRAM = """\
HloModule step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%body.1 (arg: (s32[], f32[64])) -> (s32[], f32[64]) {
  %gather.1 = f8e4m3fn[64,32]{1,0} all-gather(%values.1), dimensions={0}
  %both.1 = (u8[128]{0}, /*index=1*/f32[8]{0}) all-gather-done(%both.0)
}

%inner (arg: bf16[16]) -> bf16[4] {
  ROOT %scattered = bf16[4]{0} reduce-scatter(%partial), to_apply=%add
}

ENTRY %main.1 (x: f32[8]) -> f32[8] {
  %started = ((f8e4m3fn[16,32]{1,0}), f8e4m3fn[64,32]{0,1:S(1)}) all-gather-start(%values.2)
  %done = f8e4m3fn[64,32]{0,1:S(1)} all-gather-done(%started), metadata={op_name="jit(f)/gather"}
  %loop = (s32[], f32[64]) while(%t), condition=%c, body=%body.1, backend_config={"known_trip_count":{"n":"3"}}
  %call = bf16[4]{0} call(%partial.1), to_apply=%inner
  ROOT %sum = f32[] all-reduce(%done.1), replica_groups={{0,1,2,3}}
}
"""  # noqa: E501


def test_bytes_that_a_program_moves():
    assert _mesh.moved_bytes(PROGRAM, num_devices=4) == {
        "all-gather f32": 3 * 8 * 4,
        "all-gather f8e4m3fn": 64 * 32 * (1 + 3),
        "all-gather u8": 3 * 128,
        "all-reduce f32": 4,
        "reduce-scatter bf16": 4 * 2 * 4,
    }


def test_a_loop_of_unknown_length_is_refused():
    text = PROGRAM.replace("known_trip_count", "other")
    with pytest.raises(ValueError, match="must say how often it runs; got   %loop"):
        _mesh.moved_bytes(text, num_devices=4)


def test_work_of_a_stack():
    largest = _fsdp.STACKS[0]
    assert largest.num_weights == 4 * 704643072  # three matrices of Llama-3-70B
    assert largest.flop == 2 * 34 * 8192 * 8192 * 28672
    assert TINY.flop == 2 * 7 * 128 * 256 * 512


@pytest.fixture
def two_devices(monkeypatch):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    on = jax.make_mesh((2,), (_mesh.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    for module in (_mesh, _fsdp):
        monkeypatch.setattr(module, "local_mesh", lambda: on)
    # Without LLVM's work on programs that run a few times.
    monkeypatch.setattr(_mesh, "_OPTIONS", {"xla_backend_optimization_level": 0})


def test_layers_in_a_scan_train_as_in_bf16(two_devices):
    stack = _fsdp.Stack("tiny", 2, hidden=256, inter=256, tokens=128, loop="scan")
    ours, bf16 = (_fsdp.fsdp_call(stack, f) for f in (jax_fp8gemm.matmul, jnp.matmul))
    losses = np.array([[float(call.run()) for _ in range(3)] for call in (ours, bf16)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
    assert (np.diff(losses) < 0).all()
    # Each weight forward and backward.
    assert ours.moved_bytes is not None and bf16.moved_bytes is not None
    assert sum(bf16.moved_bytes.values()) > 2 * 2 * stack.num_weights
    assert ours.moved_bytes[f"all-gather {FP8[0]}"] == 2 * stack.num_weights * FP8[1]


def test_command_line_measures_and_saves(two_devices, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_ffi, "unavailable_reason", lambda: None)
    monkeypatch.setattr(_cli, "copy_gbps", lambda: 4000.0)
    monkeypatch.setattr(_cli, "STACKS", (TINY,))
    file = tmp_path / "fsdp.json"
    assert bench.main(["fsdp", "--no-peers", "--repeat", "1", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["name"] == "tiny" and row["gpus"] == 2 and row["timer"] == "wall"
    assert row["us"] > 0 and row["peers"] == {}
    # Of the first layer gate and up are not read backward, down is. The gradients are f32 sums.
    moved = row["moved_bytes"]
    assert moved[f"all-gather {FP8[0]}"] == (3 + 1) * 256 * 512 * FP8[1]
    assert moved["reduce-scatter f32"] == 4 * TINY.num_weights
    assert row["peak_bytes"] > 20 * TINY.num_weights // 2
    printed = capsys.readouterr().out
    assert "peak memory of tiny (tokens=128, mode=unrolled), GB: ours 0.0" in printed
    assert "moved by tiny (tokens=128, mode=unrolled), GB: ours [" in printed


def test_refuses_one_device(monkeypatch, capsys):
    monkeypatch.setattr(_ffi, "unavailable_reason", lambda: None)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert bench.main(["fsdp"]) == 1
    assert "fsdp needs at least two GPUs; got 1. Nothing measured." in capsys.readouterr().out


def test_steps_are_timed_after_the_first_sample():
    calls = []
    call = _timer.Call(lambda: calls.append(0) or np.zeros(()), _timer.jax_queue(), max_repeat=2)
    timing = _mesh.measure_steps(call, repeat=20)
    assert len(calls) == (1 + 2) * 3 and timing.timer == "wall" and timing.us > 0
