"""The benchmarks on all GPUs: the bytes that a program moves, and that they run."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from errors import raises
from jax.sharding import AxisType

import benchmarks
from benchmarks import cli
from benchmarks.families import all_cases, exchanges, expert_parallel, fsdp, hlo_text, mesh
from benchmarks.timing import timer
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.rounds import Rounds, Timing, measure_rounds
from jax_fp8gemm._runtime import extension
from jax_fp8gemm.moe._parallel import ragged_all_to_all

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")

TINY = fsdp.Stack("tiny", 1, hidden=256, inter=512, tokens=128, loop="unrolled")
MIXTURE = expert_parallel.Mixture("tiny", 2, tokens=64, top_k=2, hidden=128, inter=64)
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
    assert mesh.moved_bytes(PROGRAM, num_devices=4) == {
        "all-gather f32": 3 * 8 * 4,
        "all-gather f8e4m3fn": 64 * 32 * (1 + 3),
        "all-gather u8": 3 * 128,
        "all-reduce f32": 4,
        "reduce-scatter bf16": 4 * 2 * 4,
    }


def test_a_loop_of_unknown_length_is_apart():
    text = PROGRAM.replace("known_trip_count", "other")
    assert mesh.moved_bytes(text, num_devices=4) == {
        "all-gather f32, a turn": 8 * 4,
        "all-gather f8e4m3fn": 64 * 32,
        "all-gather f8e4m3fn, a turn": 64 * 32,
        "all-gather u8, a turn": 128,
        "all-reduce f32": 4,
        "reduce-scatter bf16": 4 * 2 * 4,
    }


SCHEDULED = """\
HloModule step, is_scheduled=true

%product (p: f8e4m3fn[8]) -> bf16[8] {
  ROOT %out = bf16[8]{0} custom-call(%p), custom_call_target="jax_fp8gemm_grouped_gemm"
}

%moved (p: bf16[8]) -> bf16[8] {
  ROOT %moved.1 = bf16[8]{0} all-to-all(%p), dimensions={0}
}

%turn (p: bf16[8]) -> bf16[8] {
  ROOT %again = bf16[8]{0} custom-call(%p), custom_call_target="jax_fp8gemm_grouped_gemm"
}

ENTRY %main (x: f8e4m3fn[8]) -> bf16[8] {
  %all-gather-start = (f8e4m3fn[8], f8e4m3fn[32]) all-gather-start(%x), dimensions={0}
  %quantised = f8e4m3fn[8]{0} custom-call(%x), custom_call_target="jax_fp8gemm_quantize"
  %all-gather-done = f8e4m3fn[32]{0} all-gather-done(%all-gather-start)
  %all-gather-start.1 = (f8e4m3fn[8], f8e4m3fn[32]) all-gather-start(%x), dimensions={0}
  %first = bf16[8]{0} fusion(%all-gather-done), kind=kCustom, calls=%product
  %back = ((bf16[8]{0}), bf16[8]{0}) all-to-all-start(%first), calls=%moved
  %loop = bf16[8]{0} while(%first), condition=%c, body=%turn
  %all-gather-done.1 = f8e4m3fn[32]{0} all-gather-done((f8e4m3fn[8], f8e4m3fn[32]) %all-gather-start.1)
  %dw = bf16[8]{0} custom-call(%first), custom_call_target="jax_fp8gemm_grouped_wgrad"
  %second = bf16[8]{0} call(%all-gather-done.1), to_apply=%product
  %back.1 = bf16[8]{0} all-to-all-done(%back)
  ROOT %sum = bf16[8]{0} all-reduce(%back.1), to_apply=%add
}
"""  # noqa: E501


def test_products_that_are_queued_while_a_collective_runs():
    assert hlo_text.products_beside(SCHEDULED) == {
        "all-gather": [0, 1],
        "all-reduce": [0],
        "all-to-all": [2],
    }


def test_work_of_a_stack():
    largest = fsdp.STACKS[0]
    assert largest.num_weights == 4 * 704643072  # three matrices of Llama-3-70B
    assert largest.flop == 2 * 34 * 8192 * 8192 * 28672
    assert TINY.flop == 2 * 7 * 128 * 256 * 512


@pytest.fixture
def two_devices(monkeypatch):
    if jax.device_count() < 2:
        # conftest makes eight CPU devices: only on a machine of one GPU.
        pytest.skip("needs two devices")
    on = jax.make_mesh((2,), (mesh.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    for module in (mesh, fsdp, expert_parallel):
        monkeypatch.setattr(module, "local_mesh", lambda: on)
    # Without LLVM's work on programs that run a few times.
    monkeypatch.setattr(mesh, "_OPTIONS", {"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("loop", ["scan", "scan, gated_mlp", "scan, products saved"])
def test_layers_in_a_scan_train_as_in_bf16(two_devices, loop):
    stack = fsdp.Stack("tiny", 2, hidden=256, inter=256, tokens=128, loop=loop)
    case = fsdp.fsdp_case(stack)
    ours, bf16 = case.build(), case.peers["xla_bf16"]()
    losses = np.array([[float(call.run()) for _ in range(3)] for call in (ours, bf16)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
    assert (np.diff(losses) < 0).all()
    # Each weight forward and backward.
    assert ours.moved_bytes is not None and bf16.moved_bytes is not None
    assert sum(bf16.moved_bytes.values()) > 2 * 2 * stack.num_weights
    weights = 2 * stack.num_weights
    assert ours.moved_bytes[f"all-gather {FP8[0]}"] / FP8[1] == weights


def test_weight_gradients_from_squares_are_measured_beside_bf16_sums(two_devices):
    stack = fsdp.Stack("tiny", 2, hidden=256, inter=256, tokens=128, loop="scan", sums="bf16")
    case = fsdp.fsdp_case(stack)
    ours, square = case.build(), case.peers["square_wgrad"]()
    losses = [[float(call.run()) for _ in range(2)] for call in (ours, square)]
    assert losses[0][0] == losses[1][0]  # forward nothing differs
    assert losses[0][1] != losses[1][1]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=0.02)
    assert "square_wgrad" not in fsdp.fsdp_case(dataclasses.replace(stack, sums="f32")).peers


def test_a_scan_that_saves_products_holds_less(two_devices):
    scan = fsdp.Stack("tiny", 4, hidden=256, inter=256, tokens=512, loop="scan")
    saving = dataclasses.replace(scan, loop="scan, products saved")
    calls = [fsdp.fsdp_case(stack).build() for stack in (scan, saving)]
    # The loss of a first step is the same: what is computed again is what was.
    assert float(calls[0].run()) == pytest.approx(float(calls[1].run()), rel=1e-5)
    assert calls[1].peak_bytes < 0.9 * calls[0].peak_bytes


def test_command_line_measures_and_saves(two_devices, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cli, "copy_gbps", lambda: 4000.0)
    monkeypatch.setattr(fsdp, "STACKS", (dataclasses.replace(TINY, sums="bf16"),))
    file = tmp_path / "fsdp.json"
    assert (
        benchmarks.main(
            ["fsdp", "--no-peers", "--rounds", "1", "--calls", "1", "--json", str(file)]
        )
        == 0
    )
    (row,) = json.loads(file.read_text())["rows"]
    assert row["name"] == "tiny" and row["gpus"] == 2 and row["timer"] == "wall"
    assert row["sums"] == "bf16"
    assert row["us"] > 0 and row["peers"] == {}
    # Each weight once for both passes. XLA:CPU moves bf16 sums as f32.
    moved = row["moved_bytes"]
    assert moved[f"all-gather {FP8[0]}"] == TINY.num_weights * FP8[1]
    kind, num_bytes = ("f32", 4) if jax.default_backend() == "cpu" else ("bf16", 2)
    assert moved[f"reduce-scatter {kind}"] == num_bytes * TINY.num_weights
    assert row["peak_bytes"] > 20 * TINY.num_weights // 2
    printed = capsys.readouterr().out
    assert "peak memory of tiny (tokens=128, mode=unrolled, sums=bf16), GB: ours 0.0" in printed
    assert "moved by tiny (tokens=128, mode=unrolled, sums=bf16), GB: ours [" in printed


def test_work_of_a_mixture():
    assert expert_parallel.DEEPSEEK_V3.flop == 18 * 65536 * 7168 * 2048
    first, *others = expert_parallel.expert_parallel_cases(MIXTURE)
    forward = others[2:]
    assert [case.labels["name"] for case in forward] == ["tiny_forward"] * 3
    assert {case.work.flop for case in forward} == {first.work.flop // 3}
    assert first.labels["mode"] == "all_gather"
    others_of_all_gpus = ["every_gpu", "fp8_combine", "copy_engines"]
    assert list(first.peers) == ["one_gpu", *others_of_all_gpus, "lax_ragged_dot"]
    assert list(forward[0].peers) == ["one_gpu", *others_of_all_gpus]
    assert [list(case.peers) for case in (*others[:2], *forward[1:])] == [["one_gpu"]] * 4
    in_parts = expert_parallel.expert_parallel_cases(MIXTURE, ("1", "chosen"))
    assert [case.labels["parts"] for case in in_parts] == [1, "chosen"] * 3 + [1] * 3
    assert [list(case.peers) for case in in_parts[1:6]] == [["one_gpu"]] * 5
    weights = 2 * 128 * 128 + 2 * 64 * 128
    assert first.work.num_bytes == 2 * (4 * 64 * 128 + 2 * weights)


def test_mixture_spread_over_devices_as_on_one_and_in_bf16(two_devices, monkeypatch):
    monkeypatch.setattr(expert_parallel, "_LAX_CAPACITY", 2.0)  # for so few tokens
    first, *_ = expert_parallel.expert_parallel_cases(MIXTURE)
    ours, in_bf16 = first.build(), first.peers["lax_ragged_dot"]()
    results, bf16_results = ours.run(), in_bf16.run()
    shapes = [(128, 128), (128, 128), (128, 4), (4, 128, 128), (4, 64, 128)]
    assert [x.shape for x in results] == shapes
    for x, y in zip(results, bf16_results, strict=True):
        assert x.dtype == y.dtype
        # The same layer on the same data: FP8 with fine scales keeps to a few percent.
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) < 0.1 * np.linalg.norm(y)
    assert in_bf16.max_repeat == 1
    # x and dout to both devices, and a scale, an index or a weight for 128 of their values.
    assert ours.moved_bytes is not None and in_bf16.moved_bytes is not None
    assert ours.moved_bytes[f"all-gather {FP8[0]}"] == 2 * 128 * 128 * FP8[1]
    assert ours.moved_bytes["all-gather f32"] == 128 * 4 * (2 + 2)
    assert ours.moved_bytes["all-gather s32"] == 128 * 4 * 2
    in_fp8 = first.peers["fp8_combine"]()
    assert in_fp8.moved_bytes is not None
    # Results and dx, of 128 tokens on each device before they are added.
    assert in_fp8.moved_bytes[f"all-to-all {FP8[0]}"] == 2 * 128 * 128 * FP8[1]
    assert f"all-to-all {FP8[0]}" not in ours.moved_bytes
    in_fp8 = np.asarray(in_fp8.run()[0], np.float32)
    x = np.asarray(results[0], np.float32)
    assert 0 < np.linalg.norm(in_fp8 - x) < 0.1 * np.linalg.norm(x)
    one_gpu = first.peers["one_gpu"]()
    out, *gradients = one_gpu.run()
    assert out.shape == (64, 128) and len(out.devices()) == 1
    assert [x.shape for x in gradients] == [(64, 128), (64, 2), (2, 128, 128), (2, 64, 128)]
    assert one_gpu.moved_bytes is None


def test_every_gpu_runs_the_layer_of_one(two_devices):
    first, *_, forward = expert_parallel.expert_parallel_cases(MIXTURE)[:4]
    every, (one, *_) = first.peers["every_gpu"](), first.peers["one_gpu"]().run()
    out, *gradients = every.run()
    assert [x.shape for x in (out, *gradients)] == [x.shape for x in first.build().run()]
    assert len(out.devices()) == 2 and every.moved_bytes is None
    # Numbers of the first device's tokens and experts are other ones on a mesh of one device.
    assert np.linalg.norm(np.asarray(out[:64], np.float32)) > 0 and one.shape == (64, 128)
    np.testing.assert_array_equal(forward.peers["every_gpu"]().run(), out)


def test_copy_engines_change_no_bit(two_devices):
    first, *_ = expert_parallel.expert_parallel_cases(MIXTURE)
    for x, y in zip(first.build().run(), first.peers["copy_engines"]().run(), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_forward_pass_alone_gives_the_result_of_the_step(two_devices):
    step, *_, forward = expert_parallel.expert_parallel_cases(MIXTURE)[:4]
    assert forward.labels["name"] == "tiny_forward"
    np.testing.assert_array_equal(forward.build().run(), step.build().run()[0])


def test_command_line_measures_every_exchange(two_devices, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cli, "copy_gbps", lambda: 4000.0)
    of_program = dict(moved_bytes={"all-gather f32": 10**7}, products_beside={"all-gather": [0, 2]})
    call = timer.Call(lambda: np.zeros(()), jax_queue(), **of_program)
    monkeypatch.setattr(expert_parallel, "expert_parallel_call", lambda *args, **kwargs: call)
    file = tmp_path / "expert_parallel.json"
    arguments = ["--rounds", "1", "--calls", "1", "--peers", "one_gpu", "--json", str(file)]
    assert benchmarks.main(["expert-parallel", "--parts", "1", "2", *arguments]) == 0
    rows = json.loads(file.read_text())["rows"]
    names = ["all_gather", "all_to_all", "ragged_all_to_all"]
    expected = [(name, parts) for name in names for parts in (1, 2)] + [(n, 1) for n in names]
    assert [(row["mode"], row["parts"]) for row in rows] == expected
    for row in rows:
        assert row["family"] == "expert_parallel" and row["gpus"] == 2 and row["timer"] == "wall"
        assert row["tokens"] == 8192 and list(row["peers"]) == ["one_gpu"]
    printed, of = capsys.readouterr().out, "deepseek_v3 (tokens=8192, mode=all_gather, parts=2)"
    assert f"moved by {of}, GB: ours [all-gather f32 0.010], one_gpu " in printed
    assert f"beside collectives of {of}, products: ours [all-gather 0 2], one_gpu " in printed


def test_exchanges_by_name():
    modes = exchanges.modes_of(["all"], 4)
    assert [mode.text for mode in modes] == list(exchanges.ALL)
    assert not any("+" in mode.text for mode in exchanges.modes_of(["all"], 2))
    (ragged,) = exchanges.modes_of(["ragged_all_to_all/8"], 2)
    assert ragged_all_to_all.num_updates(4) == 64
    with ragged.applied():
        assert ragged_all_to_all.num_updates(4) == 8
    pair = exchanges.parse_mode("all_to_all+ragged_all_to_all")
    assert pair.options() == dict(
        expert_axis=("hosts", mesh.AXIS), exchange=("all_to_all", "ragged_all_to_all")
    )
    with raises(ValueError, "bench: --exchange must be all, or of .*; got 'ring'"):
        exchanges.parse_mode("ring")
    for text in ("all_gather/8", "all_gather+all_gather+all_gather", "ragged_all_to_all/0"):
        with raises(ValueError, "bench: "):
            exchanges.parse_mode(text)


def test_rows_that_an_exchange_receives():
    """Of 8192 tokens with 8 choices on each of 8 devices."""
    received = lambda text, *sizes: exchanges.received_rows(
        exchanges.make(exchanges.parse_mode(text), sizes, 8192, 8)
    )
    share = 1 - (7 / 8) ** 8
    assert received("all_gather", 8) == 7 * 8192
    assert received("all_to_all", 8) == 7 * 6144  # 1.125 shares, in whole blocks
    assert received("ragged_all_to_all", 8) == pytest.approx(7 * 8192 * share)
    of_hosts = 8192 * (1 - 0.5**8)
    passed_on = 3 * 2 * 8192 * share
    both = "ragged_all_to_all+ragged_all_to_all"
    assert received(both, 2, 4) == pytest.approx(of_hosts + passed_on)


def test_command_line_measures_exchanges_alone_and_in_the_layer(monkeypatch, tmp_path):
    if jax.device_count() < 4:
        # conftest makes eight CPU devices: only on a machine of fewer GPUs.
        pytest.skip("needs four devices")
    on = jax.make_mesh((4,), (mesh.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    for module in (mesh, expert_parallel, all_cases):
        monkeypatch.setattr(module, "local_mesh", lambda: on)
    monkeypatch.setattr(mesh, "_OPTIONS", {"xla_backend_optimization_level": 0})
    monkeypatch.setattr(expert_parallel, "DEEPSEEK_V3", MIXTURE)
    file = tmp_path / "exchanges.json"
    modes = ["ragged_all_to_all/8", "all_to_all+all_gather"]
    arguments = ["--exchange", *modes, "--no-peers", "--dry-run", "--json", str(file)]
    assert benchmarks.main(["expert-parallel", *arguments]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["mode"] for row in rows] == modes * 3
    names = "tiny_exchange", "tiny", "tiny_forward"
    assert [row["name"] for row in rows] == [name for name in names for _ in modes]
    # Once each way; the bytes of the pair along both axes.
    moved = rows[1]["moved_bytes"]
    assert moved[f"all-to-all {FP8[0]}"] == 2 * 64 * 128 * FP8[1]
    assert moved[f"all-gather {FP8[0]}"] == 2 * 2 * 64 * 128 * FP8[1]


@pytest.mark.parametrize("family", ["fsdp", "expert-parallel"])
def test_refuses_one_device(family, monkeypatch, capsys):
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert benchmarks.main([family]) == 1
    assert f"{family} needs at least two GPUs; got 1. Nothing measured." in capsys.readouterr().out


@pytest.mark.parametrize(
    "seconds, num_calls",
    [
        (1.0, 3),
        (0.016, 3 + 13),  # three steps take less than 0.2 s, and 13 do not
    ],
)
def test_steps_are_timed_after_a_warm_up(monkeypatch, seconds, num_calls):
    calls = []

    def step():
        calls.append(0)
        return np.zeros(())

    monkeypatch.setattr(mesh.time, "perf_counter", lambda: len(calls) * seconds)
    call = timer.Call(step, jax_queue(), max_repeat=2)
    timing = measure_rounds({"": call}, Rounds(20, 1, sampler=mesh.sample_steps))[""]
    assert isinstance(timing, Timing) and timing.timer == "wall"
    assert timing.us == pytest.approx(seconds * 1e6)
    assert len(calls) == 2 + 2 * num_calls  # to warm up, and two samples
