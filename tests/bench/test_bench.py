"""The benchmark's arithmetic, parsing and files. Nothing is timed here."""

import ctypes
import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_clock import DEVICE, fake_rounds, fake_sampler

import benchmarks
from benchmarks import cli, problem, report, run
from benchmarks.case import tile_text
from benchmarks.families import activation, host, mlp, products
from benchmarks.footer import footer
from benchmarks.problem import Shape, Work
from benchmarks.shapes import draw_shapes, row_shapes
from benchmarks.summary import summarise
from benchmarks.tiles import parse_tile, with_tiles
from benchmarks.timing import cupti, queues, rounds, timer
from benchmarks.timing.cupti import Activity
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import tile_config

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")


def activity(name: str, us: float, start_us: float = 0) -> Activity:
    return Activity(name, int(start_us * 1e3), int((start_us + us) * 1e3))


def test_shapes_parse():
    assert problem.parse_shape("4096x7168x2048", "dense") == Shape(4096, 7168, 2048)
    assert problem.parse_shape("8192x7168", "quantize") == Shape(8192, None, 7168)
    assert str(Shape(8192, None, 7168)) == "8192x7168"


@pytest.mark.parametrize("text", ["4096x7168", "4096x7168x", "0x128x128", "axbxc", "1x2x3x4"])
def test_bad_shapes_raise(text):
    with pytest.raises(ValueError, match="--shape must be MxNxK with positive sizes; got"):
        problem.parse_shape(text, "dense")


def test_sets_of_rows():
    small, large = row_shapes("dense", "small"), row_shapes("dense", "large")
    assert len(small) + len(large) == len(row_shapes("dense")) == 42
    assert max(shape.m for shape in small) <= 512 and min(shape.m for shape in large) >= 1024
    for family in ("dense", "ragged", "masked"):
        held_out = row_shapes(family, "held-out")
        assert held_out and len(set(held_out)) == len(held_out)
    fitted = {shape for shape in row_shapes("dense") if shape != Shape(4096, 576, 7168)}
    assert not fitted & set(row_shapes("dense", "held-out"))
    assert row_shapes("wgrad", "held-out") == []


def test_drawn_rows_are_the_same_every_time():
    for family in ("dense", "ragged"):
        shapes = draw_shapes(family, 20)
        assert len(set(shapes)) == 20 and shapes == draw_shapes(family, 20)
        assert shapes[:5] == draw_shapes(family, 5)
        assert all(shape.n % 16 == 0 and shape.k % 16 == 0 for shape in shapes)
    assert draw_shapes("masked", 3) == []


def test_dense_floors():
    # 4096x4096x7168: 2 * 4096 * 7168 values, 2 MB + 7 KB of scales, 32 MB of bf16 results.
    work = problem.gemm_work(Shape(4096, 4096, 7168), is_1d1d=False, out_bytes=2, accumulate=False)
    assert work.num_bytes == 2 * 4096 * 7168 + 4 * (4096 * 56 + 32 * 56) + 2 * 4096 * 4096
    assert work.hbm_floor_us(4270.0) == pytest.approx(21.82, abs=0.02)
    assert work.tensor_floor_us(132) == pytest.approx(121.54, abs=0.1)  # 1979 TFLOPS
    assert work.tflops(168.86) == pytest.approx(1424, abs=1)


def test_wgrad_work_reads_what_it_accumulates_into():
    shape = Shape(256, 128, 512)
    plain = problem.gemm_work(shape, is_1d1d=True, out_bytes=4, accumulate=False)
    accumulated = problem.gemm_work(shape, is_1d1d=True, out_bytes=4, accumulate=True)
    assert plain.num_bytes == (256 + 128) * 512 + 4 * (256 + 128) * 4 + 4 * 256 * 128
    assert accumulated.num_bytes - plain.num_bytes == 4 * 256 * 128


@pytest.mark.parametrize(
    "mode, num_bytes",
    [
        ("rows", 3 * 256 * 384 + 4 * 256 * 3),
        ("columns", 3 * 256 * 384 + 4 * 384 * 2),
        ("rows+columns", 4 * 256 * 384 + 4 * (256 * 3 + 384 * 2)),
        ("blocks", 3 * 256 * 384 + 4 * 6),
        ("blocks+transposed", 4 * 256 * 384 + 4 * 6),
    ],
)
def test_quantize_bytes(mode, num_bytes):
    (case,) = [
        case
        for case in products.cases("quantize", [Shape(256, None, 384)])
        if case.labels["mode"] == mode
    ]
    assert case.work.num_bytes == num_bytes


def test_activities_are_split_by_call_and_kernel():
    call = [activity("flush", 200), activity("fp8_gemm_128", 10), activity("copy", 3)]
    counted, other = timer.split(call * 2, num_calls=2, num_flush=1, kernel="fp8_gemm")
    assert counted == [10, 10] and other == [3, 3]
    counted, other = timer.split(call * 2, num_calls=2, num_flush=1, kernel="")
    assert counted == [13, 13] and other == [0, 0]


def test_uneven_or_missing_activities_raise():
    with pytest.raises(ValueError, match="must run the same kernels"):
        timer.split([activity("a", 1)] * 3, num_calls=2, num_flush=0, kernel="")
    with pytest.raises(ValueError, match=r"a kernel named \*fp8_gemm\* must run"):
        timer.split([activity("a", 1)] * 2, num_calls=2, num_flush=0, kernel="fp8_gemm")


def test_cupti_records_are_read_at_their_offsets():
    name = ctypes.create_string_buffer(b"fp8_gemm")
    record = np.zeros(208, np.uint8)
    record[:4].view(np.uint32)[:] = 10
    record[16:32].view(np.uint64)[:] = 1000, 3500
    record[104:112].view(np.uint64)[:] = ctypes.addressof(name)
    assert cupti.read_record(record.ctypes.data) == Activity("fp8_gemm", 1000, 3500)
    assert Activity("fp8_gemm", 1000, 3500).us == 2.5
    record[:4].view(np.uint32)[:] = 2
    assert cupti.read_record(record.ctypes.data) == Activity("[memset]", 1000, 3500)
    record[:4].view(np.uint32)[:] = 5  # a driver call
    assert cupti.read_record(record.ctypes.data) is None


def test_summary_has_means_and_the_worst_row():
    ratios = {Shape(4096, 1, 1): 2.0, Shape(1024, 1, 1): 0.5, Shape(8, 1, 1): 1.5}
    lines = summarise(ratios, "peer", noisy={Shape(1024, 1, 1)})
    assert lines[0] == (
        "m >= 1024: 1.000x peer (geometric mean of 2 rows, 0 of them slower for certain), "
        "worst 0.500x at 1024x1x1"
    )
    assert lines[1].startswith("m <= 512: 1.500x peer")


def test_activations_run_beside_silu():
    forward, gradient = activation.activation_cases([Shape(256, None, 384)])[::5]
    assert [case.labels["pass"] for case in (forward, gradient)] == ["fwd", "bwd"]
    scales = lambda width: 4 * (256 * width // 128 + width * 2)
    assert forward.work.num_bytes == 256 * 384 * (2 * 2 + 2) + scales(384)
    assert gradient.work.num_bytes == 256 * 384 * (3 * 2 + 4) + scales(768)
    for case, width in ((forward, 384), (gradient, 768)):
        assert list(case.peers) == ["silu"]
        for build in (case.build, *case.peers.values()):
            rows, columns = build().run()
            assert rows.shape == (256, width) and columns.shape == (width, 256)


@pytest.mark.parametrize("family", ["dense", "wgrad", "quantize"])
def test_families_run_and_write_the_schema(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # absent, also where it is installed
    shape = Shape(128, None if family == "quantize" else 128, 256)
    file = tmp_path / "rows.json"
    options = run.Options(fake_rounds(4.0), ("xla", "deepgemm"), [file], notes={"flush": "write"})
    rows = run.run(family, products.cases(family, [shape]), options, DEVICE).rows
    document = json.loads(file.read_text())
    head = ["device", "machine", "date", "commit", "dirty", "versions", "rounds", "calls", "seed"]
    assert list(document) == [*head, "copy_gbps", "flush", "failed_rows", "rows"]
    assert document["device"] == "NVIDIA H200" and document["copy_gbps"] == 4270
    assert len(document["rows"]) == len(rows) == {"dense": 1, "wgrad": 2, "quantize": 5}[family]
    for row in document["rows"]:
        keys = {"family", "m", "n", "k", "us", "tflops", "gbps", "config", "peers", "spread"}
        assert keys <= set(row)
        assert row["family"] == family and row["us"] == 4.0 and "deepgemm" not in row["peers"]
        assert row["spread"] == [4.0, 4.0] and row["all_us"] == 4.5
        assert ("deepgemm" in row["peers_absent"]) == (family != "quantize")
    printed = capsys.readouterr().out
    assert ("deepgemm: absent in" in printed) == (family != "quantize")


def test_mlp_runs_forward_and_backward():
    tiny = mlp.Mlp("tiny", rows=128, hidden=128, inter=256)
    out, gradients = mlp.mlp_call(tiny, jnp.matmul).run()
    assert out.shape == (128, 128)
    assert [g.shape for g in gradients] == [(128, 128), (128, 256), (128, 256), (256, 128)]
    assert tiny.flop == 3 * 3 * 2 * 128 * 128 * 256


def test_table_prints_ratios_over_ours():
    row = report.Row(
        family="dense",
        labels={"m": 64, "n": 128, "k": 256},
        shape=Shape(64, 128, 256),
        work=Work(2 * 64 * 128 * 256, 1000),
        hbm_fraction=0.5,
        tensor_fraction=0.25,
        config="64x128",
        ours=rounds.Timing(10.0, (9.0, 11.0)),
        peers={
            "xla_bf16": rounds.Timing(15.0, (14.0, 15.5)),
            "torch_bf16": rounds.Timing(10.5, (10.5, 11.5)),
        },
    )
    table = report.Table(["m", "n", "k"], ["xla_bf16", "torch_bf16", "deepgemm"])
    assert "15.00 (1.50x) " in table.line(row) and " 50%" in table.line(row)
    assert "10.50 (1.05x)~" in table.line(row)
    assert len(table.line(row)) == len(table.header())
    by_host = dataclasses.replace(row, ours=rounds.Timing(10.0, (9.0, 11.0), timer="host"))
    assert any("no CUPTI" in line for line in footer([by_host], "GPU", 4000.0, 132))


def test_results_go_to_a_folder_of_the_device():
    path = report.results_path("benchmarks/results", "NVIDIA H200", "dense")
    assert str(path) == "benchmarks/results/nvidia_h200/dense.json"


def test_refuses_where_the_kernels_do_not_run(monkeypatch, capsys):
    monkeypatch.setattr(
        extension, "unavailable_reason", lambda: "needs an sm90a device; got no GPU"
    )
    assert benchmarks.main(["dense"]) == 1
    assert "needs an sm90a device; got no GPU. Nothing measured." in capsys.readouterr().out


def test_refuses_options_that_would_do_nothing(capsys):
    for arguments in (
        ["host", "--sustained"],
        ["matmul", "--shape", "1x2x3"],
        ["fsdp", "--sustained"],
    ):
        with pytest.raises(SystemExit):
            benchmarks.main(arguments)
        assert "has fixed sizes; got --shape or --sustained" in capsys.readouterr().err
    for family in ("wgrad", "ragged-wgrad", "quantize"):
        with pytest.raises(SystemExit):
            benchmarks.main([family, "--rows", "small"])
        message = f"--rows must leave {family} a row to measure; got small"
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmarks.main(["dense", "--peers", "cublas"])
    assert "--peers must be of deepgemm, cublaslt_tensorwise" in capsys.readouterr().err


def test_command_line_measures_saves_and_compares(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cli, "copy_gbps", lambda: 4000.0)
    clock = fake_sampler(5.0, 10.0)
    monkeypatch.setattr(cli, "sample_flushed", lambda call, num, flush: clock(call, num))
    arguments = ["--shape", "1024x128x256", "--peers", "xla_bf16", "--save", str(tmp_path)]
    assert benchmarks.main(["dense", *arguments]) == 0
    (file,) = tmp_path.glob("*/dense.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert row["us"] == 5.0 and row["peers"] == {"xla_bf16": 10.0}
    assert row["peers_spread"] == {"xla_bf16": [10.0, 10.0]}
    assert "m >= 1024: 2.000x xla_bf16" in capsys.readouterr().out
    # Now 6 us, and before 5.
    clock = fake_sampler(6.0, 10.0)
    assert benchmarks.main(["dense", *arguments[:-2], "--compare", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "slower: {" in printed and "5.00 -> 6.00 us (1.200x)" in printed
    assert "1 slower and 0 faster by more than the noise of both" in printed


def test_a_file_to_compare_with_is_read_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["dense", "--compare", str(tmp_path / "missing.json")])
    assert "No such file or directory" in capsys.readouterr().err


def test_host_times_have_a_baseline(monkeypatch):
    monkeypatch.setattr(host, "_NUM_ROUNDS", 1)
    monkeypatch.setattr(host, "_NUM_CALLS", 1)
    times = host.host_times()
    assert list(times)[0] == "x + 1" and "matmul" in times and min(times.values()) > 0


@pytest.mark.gpu
def test_cupti_times_jax_kernels():
    x = jnp.ones((1 << 28,), jnp.float32)  # 2 GiB moved: about 0.5 ms on an H200
    increment = jax.jit(lambda x: x + 1)
    call = timer.Call(lambda: increment(x), queues.jax_queue())
    timing = rounds.measure(call)
    assert timing.timer == "cupti" and 300 < timing.us < 3000 and timing.other_us == 0
    for sampler in (
        functools.partial(timer.sample_flushed, flush="read"),
        timer.sample_chain,
        functools.partial(timer.sample_sustained, seconds=0.05),
    ):
        other = rounds.measure(call, sampler)
        assert other.timer == "cupti" and 0.5 < other.us / timing.us < 2


def test_tile_text_is_read_back():
    for config in (*tile_config.CONFIGS, *tile_config.CLUSTER_CONFIGS):
        assert parse_tile(tile_text(config)) == config


@pytest.mark.parametrize("text", ["128x256", "128x256/128 w2 a1 s3 d4", "x"])
def test_tile_text_that_cannot_be_read(text, capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["dense", "--tile", text])
    assert f"got '{text}'" in capsys.readouterr().err


def test_tiles_are_refused_where_there_are_none(capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["quantize", "--tile", "all"])
    assert (
        "--tile is for dense, wgrad, ragged, masked, ragged-wgrad, wgrad-square, "
        "ragged-wgrad-square; got quantize" in capsys.readouterr().err
    )


def test_every_case_runs_with_every_tile():
    shapes = [Shape(128, 256, 512), Shape(64, 128, 256)]
    tiles = ["all", "192x128/64 w3 a1 s4 d2 c1x1"]
    rows = list(with_tiles(products.cases("dense", shapes), tiles))
    num_tiles = len(tile_config.configs(is_1d1d=False, with_clusters=True)) + 1
    assert len(rows) == len(shapes) * num_tiles
    assert rows[-1].config == tiles[-1]
