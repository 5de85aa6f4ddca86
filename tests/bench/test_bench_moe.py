"""The benchmark of mixture-of-experts layers: sizes, work, memory, and that it runs."""

import dataclasses
import functools
import json
import re
import sys

import jax
import numpy as np
import pytest
from fake_clock import DEVICE, fake_rounds, fake_sampler

import benchmarks
from benchmarks import cli, run
from benchmarks.case import peak_bytes
from benchmarks.families import grouped_problem, moe
from jax_fp8gemm._runtime import extension

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")

TINY = moe.Experts("tiny", groups=2, hidden=128, inter=256, rows=200)


@functools.cache
def tiny_case():
    """The case of TINY, which compiles its programs once for all tests."""
    case = moe.moe_case(TINY)
    peers = {name: functools.cache(build) for name, build in case.peers.items()}
    return dataclasses.replace(case, build=functools.cache(case.build), peers=peers)


def test_work_of_a_layer():
    work = moe.moe_case(TINY).work
    assert work.flop == 3 * 3 * 2 * 200 * 128 * 256
    weights = 2 * 128 * 512 + 2 * 256 * 128
    assert work.num_bytes == 2 * (4 * 200 * 128 + 2 * weights)
    deepseek = moe.moe_case(moe.LAYERS[0]).work
    assert deepseek.flop == 8658654068736 and deepseek.tflops(94497.6) == pytest.approx(91.6, 1e-3)


def test_shares_are_uneven_and_sum_to_the_rows():
    shares = grouped_problem.draw_shares(16, 32768)
    assert shares.sum() == 32768 and shares.dtype == np.int32
    assert shares.min() < 0.7 * 2048 and shares.max() > 1.3 * 2048


def test_layer_runs_forward_and_backward():
    case = tiny_case()
    shapes = [(200, 128), (2, 128, 512), (2, 256, 128)]
    ours, lax = case.build(), case.peers["lax_ragged_dot"]()
    (out, gradients), (lax_out, lax_gradients) = ours.run(), lax.run()
    assert out.shape == (200, 128) and [g.shape for g in gradients] == shapes
    assert {x.dtype.name for x in (out, *gradients)} == {"bfloat16"}
    # The same layer on the same data: FP8 with fine scales keeps to a few percent.
    for ours_x, lax_x in zip((out, *gradients), (lax_out, *lax_gradients), strict=True):
        a, b = np.asarray(ours_x, np.float32), np.asarray(lax_x, np.float32)
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)
    assert ours.kernel == lax.kernel == "" and lax.max_repeat == 3


def test_weights_quantised_once_give_the_same_bits():
    case = tiny_case()
    found, expected = case.peers["quantised_once"]().run(), case.build().run()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def result_and_gradients(call):
    """The result, and the gradients of x, w_gate_up and w_down."""
    out, gradients = call.run()
    return [np.asarray(x, np.float32) for x in (out, *gradients)]


@pytest.mark.parametrize(
    "peer, moved",
    [
        # Weight gradients alone; the gradients behind the activation.
        ("square_once", [False, False, True, True]),
        ("fp8_gate_up", [False, True, True, False]),
    ],
)
def test_recipes_are_those_of_the_peers(peer, moved):
    case = tiny_case()
    found, expected = map(result_and_gradients, (case.peers[peer](), case.build()))
    pairs = list(zip(found, expected, strict=True))
    assert [not np.array_equal(x, y) for x, y in pairs] == moved
    for x, y in pairs:
        assert np.linalg.norm(x - y) < 0.1 * np.linalg.norm(y)


def test_peak_memory_counts_arguments_and_results():
    x = jax.ShapeDtypeStruct((1000,), np.float32)
    program = jax.jit(lambda x: (x + 1, x + 2)).lower(x).compile()
    assert peak_bytes(program) >= 3 * 4000


def test_schema_and_memory_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)  # absent, also where it is installed
    file = tmp_path / "moe.json"
    options = run.Options(fake_rounds(4.0), ("lax_ragged_dot", "tokamax"), [file])
    run.run("moe", [tiny_case()], options, DEVICE)
    (row,) = json.loads(file.read_text())["rows"]
    keys = {"family", "name", "groups", "rows", "hidden", "inter", "us", "tflops", "config"}
    assert keys <= set(row) and row["name"] == "tiny" and row["peers"] == {"lax_ragged_dot": 4.0}
    # Three weights and their gradients, x, dout, the result and dx, in bf16, and what is kept.
    assert row["peak_bytes"] > tiny_case().work.num_bytes
    assert row["lax_ragged_dot_peak_bytes"] > tiny_case().work.num_bytes
    printed = capsys.readouterr().out
    assert re.search(r"peak memory of tiny, GB: ours 0\.\d\d, lax_ragged_dot 0\.\d\d\n", printed)
    assert "all sizes: 1.000x lax_ragged_dot (geometric mean of 1 rows," in printed


def test_command_line_measures_every_layer(monkeypatch, capsys):
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cli, "copy_gbps", lambda: 4000.0)
    monkeypatch.setattr(moe, "LAYERS", (TINY, TINY))
    monkeypatch.setattr(moe, "moe_case", {TINY: tiny_case()}.__getitem__)
    monkeypatch.setattr(cli, "sample_chain", fake_sampler(5.0))
    assert benchmarks.main(["moe", "--no-peers"]) == 0
    assert capsys.readouterr().out.count("peak memory of tiny") == 2
