"""Documents hold the figures of the results files, and tables say what the files say."""

import json
import pathlib

import pytest

import benchmarks
from benchmarks.pages import fill, kernels, layers, readme, results, tables
from benchmarks.provenance import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs").exists(), reason="needs the checkout that the tests came from"
)

ROW = dict(
    **dict(family="dense", m=64, n=128, k=256, us=10.0, spread=[9.9, 10.3], all_us=14.0),
    **dict(hbm_fraction=0.5, tensor_fraction=0.2, tflops=400.0, gbps=2000.0, config="c"),
    peers=dict(deepgemm=9.0, xla_bf16=20.0),
    peers_spread=dict(deepgemm=[8.9, 9.1], xla_bf16=[10.2, 20.0]),
    **dict(peers_all_us=dict(xla_bf16=21.0), peers_absent=dict(tokamax="ImportError: none")),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where results files are read from; `dense.json` has ROW."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    write(tmp_path, "dense", [ROW])
    return tmp_path


def write(folder: pathlib.Path, table: str, rows: list) -> None:
    head = dict(device="GPU", date="2026-11-23", commit="abc", dirty=True, copy_gbps=4000)
    content = head | dict(versions=dict(jax="0.11.2"), rounds=5, rows=rows)
    (folder / f"{table}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("document", fill.DOCUMENTS)
def test_documents_hold_the_figures_of_the_files(document):
    # python -m benchmarks page
    text = (ROOT / document).read_text()
    assert "<!-- results" in text
    assert fill.fill(text) == text


def test_a_row_says_who_is_faster(folder):
    header, _, line, _, reason = tables.rows_table("dense").splitlines()
    assert header == "| m | n | k | us | all us | TFLOPS | deepgemm | xla_bf16 | tokamax |"
    # DeepGEMM's rounds are apart from ours, those of bf16 overlap.
    cells = "10.0 ±2.0% | 14.0 | 400 | 0.90, all 0.64 | 2.00~, all 1.50 | -"
    assert line == f"| 64 | 128 | 256 | {cells} |"
    assert reason == "- `tokamax` did not run in 1 rows: ImportError: none"


def test_lost_rows_are_counted(folder):
    lines = tables.summary_table().splitlines()
    assert "| dense | deepgemm | 1 | 0.900 | 0.90 | 0.90 | 0 | 1 | 0 |" in lines
    assert "| dense, every kernel | deepgemm | 1 | 0.643 | 0.64 | 0.64 | 0 | 1 | 0 |" in lines
    assert "| dense | xla_bf16 | 1 | 2.000 | 2.00 | 2.00 | 0 | 0 | 1 |" in lines
    assert readme.means_text() == "- dense: 0.90x; 0.64x with every kernel of both calls"


def test_products_are_compared_without_what_clears_unused_rows(folder):
    """12 of our 15 us are the product, which takes DeepGEMM 18; a fill takes 5 more."""
    peers = dict(unused_undefined=12.0, deepgemm=18.0)
    write(folder, "masked", [ROW | dict(us=15.0, all_us=20.0, peers=peers, peers_all_us=peers)])
    (folder / "dense.json").unlink()
    assert readme.means_text() == "- masked: 1.50x; 0.90x with every kernel of both calls"


def test_readme_has_the_rows_that_there_are(folder):
    assert len(readme.readme_table().splitlines()) == 2
    write(folder, "dense", [ROW | dict(m=4096, n=4096, k=7168)])
    line = readme.readme_table().splitlines()[2]
    ours = "| product 4096 x 4096 x 7168 | 10.0 us, 400 TFLOPS"
    assert line == f"{ours} | 9.0 us (0.90x) | - | - |"


def test_files_say_where_they_are_from(folder):
    assert "| `dense.json` | 2026-11-23 | abc with changes | 4000 | 5 | 0.11.2 |" in (
        tables.files_table()
    )


def test_regret_is_against_the_best_tile(folder):
    row = {k: v for k, v in ROW.items() if k != "peers"} | dict(peers=dict(a=9.0, b=8.0, c=10.0))
    write(folder, "dense_held_out_regret", [row])
    assert tables.regret_table().endswith("| dense_held_out_regret | 64x128x256 | c | b | 25.0% |")


def test_steps_are_judged_with_their_gaps(folder):
    row = dict(family="step", name="block", tokens=8192, us=1000.0, span_us=2000.0, tflops=800.0)
    row |= dict(peers=dict(xla_bf16=3000.0), peers_span_us=dict(xla_bf16=4000.0))
    write(folder, "step", [row | dict(peak_bytes=2e9, xla_bf16_peak_bytes=3e9)])
    ours, bf16 = layers.steps_table().splitlines()[2:]
    rate = "4096000 | 400 | 20% | 40% | 2.0 | 1.00"
    assert ours == f"| block | this package | 1.00 | 2.00 | {rate} |"
    assert bf16 == "| block | xla_bf16 | 3.00 | 4.00 | 2048000 | 200 | 10% | 20% | 3.0 | 2.00 |"


def test_kernels_are_sorted_by_what_they_are_for(folder):
    assert kernels.kernels_table() == "No kernels in the files yet."
    us = {"fp8_gemm_grouped_1d2d_128x256_bf16": 50.0, "fp8_gemm_grouped_k_1d1d_256x96_bf16": 20.0}
    us |= {"fp8_gemm_1d2d_transposed_128x256_f32": 5.0, "swiglu_quantize_row_bf16_e4m3": 8.0}
    us |= {"gather_quantize_row_bf16_e4m3": 3.0, "quantize_padded_column_bf16_e4m3": 4.0}
    us |= {"copy_rows_by_16": 1.0, "sum_rows_bf16_by_16": 1.0, "loop_add_fusion": 6.0}
    write(folder, "moe", [dict(name="layer", us=98.0, span_us=110.0, kernels=us)])
    cells = "25 (26%) | 50 (51%) | 8 (8%) | 7 (7%) | 2 (2%) | - | 6 (6%) | 98 | 110 | 12"
    assert kernels.kernels_table().splitlines()[-1] == f"| moe | layer | {cells} |"


def test_energy_is_of_a_call(folder):
    assert layers.energy_table() == "No energy in the files yet."
    write(folder, "dense_sustained", [ROW | dict(joules=0.1, peers_joules=dict(deepgemm=0.12))])
    line = layers.energy_table().splitlines()[-1]
    assert line == "| dense | 64x128x256 | 0.100 |  | deepgemm 0.120 (1.20x) |"


def test_plots_are_made_of_files(tmp_path, folder):
    pytest.importorskip("matplotlib")
    write(folder, "dense_curve", [ROW, ROW | dict(m=128, us=20.0)])
    out = tmp_path / "images"
    arguments = ["plot", "--results", str(folder), "--out", str(out)]
    assert benchmarks.main(arguments) == 0
    assert {path.name for path in out.iterdir()} == {"dense.svg", "dense_curve.svg", "roofline.svg"}
    first = (out / "roofline.svg").read_bytes()
    assert benchmarks.main(arguments) == 0 and (out / "roofline.svg").read_bytes() == first
