"""The benchmark of grouped products: what is drawn, counted and run."""

import json
import sys

import numpy as np
import pytest
from fake_clock import DEVICE, fake_rounds, fake_sampler

import benchmarks
from benchmarks import cli, data, problem, run
from benchmarks.case import GEMM_KERNEL, tile_text
from benchmarks.families import grouped, grouped_problem
from benchmarks.peers import AbsentError, tokamax
from benchmarks.peers import grouped as grouped_peers
from benchmarks.peers.deepgemm import padded_groups
from benchmarks.peers.grouped import wgrad_peers
from benchmarks.problem import GroupedShape, Shape
from benchmarks.shapes import row_shapes
from benchmarks.summary import summarise
from benchmarks.tiles import with_tiles
from benchmarks.timing import queues, rounds, timer
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import tile_config

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")

FAMILIES = ("ragged", "masked", "ragged_wgrad")
TINY = GroupedShape(m=100, n=256, k=384, groups=3)  # of ragged_wgrad: 3 groups of 384 tokens


def test_shapes_parse():
    shape = problem.parse_shape("4x8192x4096x7168", "ragged")
    assert shape == GroupedShape(m=8192, n=4096, k=7168, groups=4)
    assert str(shape) == "4x8192x4096x7168"
    wgrad = problem.parse_shape("8x7168x2048x4096", "ragged_wgrad")
    assert wgrad == GroupedShape(m=7168, n=2048, k=4096, groups=8)


@pytest.mark.parametrize(
    "family, form", [("ragged", "GxExNxK"), ("masked", "GxExNxK"), ("ragged_wgrad", "GxMxNxE")]
)
@pytest.mark.parametrize("text", ["8192x4096x7168", "0x8192x4096x7168", "4x8192x4096x7168x1"])
def test_bad_shapes_raise(family, form, text):
    with pytest.raises(ValueError, match=f"--shape must be {form} with positive sizes; got {text}"):
        problem.parse_shape(text, family)


def test_sizes_are_uneven_and_the_same_every_time():
    sizes = grouped_problem.draw_sizes(32, 256)
    assert sizes.dtype == np.int32 and len(set(sizes)) > 16
    assert 0.7 * 256 - 1 < sizes.min() and sizes.max() < 1.3 * 256
    np.testing.assert_array_equal(sizes, grouped_problem.draw_sizes(32, 256))
    blocks = grouped_problem.draw_sizes(32, 256, multiple=128)
    np.testing.assert_array_equal(blocks, (sizes + 127) // 128 * 128)
    assert blocks.dtype == np.int32
    assert grouped_problem.draw_sizes(8, 1).min() == 1


@pytest.mark.parametrize("expected, max_m", [(20, 1024), (192, 1024), (787, 1024), (1024, 4096)])
def test_masked_rows_hold_every_group(expected, max_m):
    assert grouped_problem.masked_rows(expected) == max_m


def test_ragged_work_counts_valid_rows():
    # 2 groups of 300 rows in all: lhs, two matrices, scales 1x128 and 128x128, bf16 results.
    work = grouped_problem.ragged_work(GroupedShape(m=150, n=192, k=256, groups=2), rows=300)
    assert work.flop == 2 * 300 * 192 * 256
    assert work.num_bytes == 300 * 256 + 2 * 192 * 256 + 4 * (300 * 2 + 2 * 2 * 2) + 2 * 300 * 192


def test_sizes_of_a_shape():
    zipf = grouped_problem.sizes_of(GroupedShape(m=16, n=8, k=8, groups=64, sizes="zipf"))
    assert zipf.sum() == 64 * 16 and zipf.dtype == np.int32
    assert zipf.max() > 10 * np.median(zipf) and zipf.min() >= 0
    shape = GroupedShape(m=100, n=8, k=8, groups=4, empty=5)
    sizes = grouped_problem.sizes_of(shape)
    assert len(sizes) == 9 and np.count_nonzero(sizes) == 4
    np.testing.assert_array_equal(sizes[sizes > 0], grouped_problem.draw_sizes(4, 100))
    (case,) = grouped.grouped_cases("ragged", [shape])
    full = grouped_problem.ragged_work(GroupedShape(100, 8, 8, groups=4), int(sizes.sum()))
    assert case.labels["groups"] == 9 and case.work == full


def test_masked_work_agrees_with_the_reference():
    # DeepGEMM's own count, without scales: 939.3 TFLOPS, 2699.7 GB/s.
    work = grouped_problem.ragged_work(GroupedShape(m=192, n=6144, k=7168, groups=32), rows=6030)
    assert work.tflops(565.47) == pytest.approx(939.3, abs=0.1)
    assert work.gbps(565.47) == pytest.approx(2699.7, rel=0.005)


def test_wgrad_work_reads_what_it_accumulates_into():
    shape = GroupedShape(m=128, n=256, k=400, groups=2)
    plain = grouped_problem.wgrad_work(shape, 896, accumulate=False)
    assert plain.flop == 2 * 128 * 256 * 896
    assert plain.num_bytes == (128 + 256) * 896 + 4 * (128 + 256) * 7 + 4 * 2 * 128 * 256
    accumulated = grouped_problem.wgrad_work(shape, 896, accumulate=True)
    assert accumulated.num_bytes - plain.num_bytes == 4 * 2 * 128 * 256


def test_groups_are_padded_for_deepgemm():
    groups = padded_groups(np.array([130, 128], np.int32))
    assert groups.shape == (384,) and groups.dtype == np.int32
    assert (groups[:130] == 0).all() and (groups[130:256] == -1).all() and (groups[256:] == 1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_the_grouped_ones(family):
    for case in grouped.grouped_cases(family, row_shapes(family)):
        assert case.config in [tile_text(tile) for tile in case.tiles]


@pytest.mark.parametrize(
    "family, out_shape",
    [("ragged", (None, 256)), ("masked", (3, 1024, 256)), ("ragged_wgrad", (3, 100, 256))],
)
def test_cases_run(family, out_shape):
    for case in grouped.grouped_cases(family, [TINY]):
        call = case.build()
        out = call.run()
        assert out.shape == tuple(dim or case.labels["rows"] for dim in out_shape)
        assert call.kernel == GEMM_KERNEL and bool((out != 0).any())
        assert call.run().shape == out.shape  # once more: an accumulator was donated


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_weight_gradients_of_lax_are_those_of_the_groups(accumulate):
    sizes = np.array([128, 0, 256], np.int32)
    call = wgrad_peers(TINY, sizes, accumulate)["lax_ragged_dot"]()
    call.run()
    out = np.asarray(call.run())  # the second: an accumulator holds two then
    lhs, rhs = (
        np.asarray(data.normal(384, n, seed=i), np.float64) for i, n in enumerate((100, 256))
    )
    ends = np.cumsum(sizes)
    for i, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        expected = (1 + accumulate) * lhs[begin:end].T @ rhs[begin:end]
        np.testing.assert_allclose(out[i], expected, rtol=1e-3, atol=1e-3)


def test_an_old_cudnn_is_said_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(grouped_peers, "loaded_libraries", lambda: {"cudnn": "91900"})
    peers = grouped_peers.ragged_peers(TINY, np.array([128, 0, 256], np.int32))
    with pytest.raises(AbsentError, match="cuDNN must be 92200 or newer; 91900 is loaded"):
        peers["lax_ragged_dot_cudnn"]()


def test_tokamax_runs_by_the_config_that_is_fastest(monkeypatch):
    times = iter([5.0, 3.0, 4.0])
    timing = lambda call, sampler, num_calls: rounds.Timing(next(times), (0.0, 0.0))
    monkeypatch.setattr(tokamax, "measure", timing)
    monkeypatch.setattr(tokamax, "tokamax_product", lambda name: "own")
    monkeypatch.setattr(tokamax, "_configured", lambda name, out_bytes: iter("abcd"))

    def build(product):
        if product == "c":
            raise ValueError("does not fit")
        return timer.Call(lambda: product, queues.jax_queue())

    assert tokamax.fastest(build, "ragged_dot", 2, max_configs=2).run() == "a"
    times = iter([5.0, 3.0, 4.0, 1.0])
    assert tokamax.fastest(build, "ragged_dot", 2).run() == "d"
    with pytest.raises(AbsentError, match="no config ran: ZeroDivisionError"):
        tokamax.fastest(lambda product: 1 / 0, "ragged_dot", 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_write_the_schema(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)  # absent, also where it is installed
    peers = ("lax_ragged_dot", "tokamax")
    file = tmp_path / "rows.json"
    options = run.Options(fake_rounds(4.0), peers, [file])
    run.run(family, grouped.grouped_cases(family, [TINY]), options, DEVICE)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == (2 if family == "ragged_wgrad" else 1)
    own = {
        "ragged": {"expected_rows", "rows"},
        "masked": {"expected_rows", "rows", "max_m"},
        "ragged_wgrad": {"m", "expected_k", "accumulate"},
    }[family]
    for row in rows:
        common = {"groups", "n", "k", "us", "tflops", "gbps", "config", "peers"}
        assert own | common | {"family"} <= set(row)
        assert (row["family"], row["groups"], row["n"], row["us"]) == (family, 3, 256, 4.0)
        assert row["peers"] == ({} if family == "masked" else {"lax_ragged_dot": 4.0})
        reason = row["peers_absent"].get("tokamax", "")
        assert reason.startswith("ModuleNotFoundError") == (family != "masked")
    assert ("tokamax: absent in" in capsys.readouterr().out) == (family != "masked")


def test_summary_is_over_all_sizes():
    ratios: dict[Shape, float] = {
        GroupedShape(8192, 1, 1, groups=4): 2.0,
        GroupedShape(600, 1, 1, groups=32): 0.5,
    }
    assert summarise(ratios, "peer", noisy=set()) == [
        "all sizes: 1.000x peer (geometric mean of 2 rows, 1 of them slower for certain), "
        "worst 0.500x at 32x600x1x1"
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_runs_with_every_tile(family):
    cases = grouped.grouped_cases(family, [TINY])[:1]
    rows = list(with_tiles(cases, ["all"]))
    is_wgrad = family == "ragged_wgrad"
    kind = tile_config.GROUPED_CONTRACTION if is_wgrad else tile_config.GROUPED_ROWS
    tiles = tile_config.configs(kind, is_1d1d=is_wgrad)
    assert [row.config for row in rows] == [tile_text(tile) for tile in tiles]
    assert rows[-1].build().run().shape[-1] == 256


def test_command_line_measures_saves_and_compares(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cli, "copy_gbps", lambda: 4000.0)
    clock = fake_sampler(10.0, 15.0)
    monkeypatch.setattr(cli, "sample_flushed", lambda call, num, flush: clock(call, num))
    shape = ["--shape", "2x64x128x256"]
    arguments = [*shape, "--save", str(tmp_path)]
    assert benchmarks.main(["ragged-wgrad", *arguments, "--no-peers"]) == 0
    (file,) = tmp_path.glob("*/ragged_wgrad.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["accumulate"] for row in rows] == [True, False] and rows[0]["k"] % 128 == 0
    assert benchmarks.main(["ragged", *arguments, "--peers", "lax_ragged_dot"]) == 0
    assert "all sizes: 1.500x lax_ragged_dot" in capsys.readouterr().out
