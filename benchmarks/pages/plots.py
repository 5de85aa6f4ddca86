"""`python -m benchmarks plot`: pictures of results files. It needs matplotlib.

Of each file of products, bars side by side, and one roofline of all. Of curves, lines.
"""

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages.results import FOLDER, Document, Row, labels_of, load, peers_of
from benchmarks.problem import FP8_TFLOPS
from benchmarks.provenance import ROOT

BARS = ("dense", "wgrad", "ragged", "masked", "ragged_wgrad", "dense_held_out", "ragged_held_out")
CURVES = {"dense_curve": "m", "ragged_curve": "groups"}
_NAMES = {"": "this package", "deepgemm": "DeepGEMM", "cublaslt_tensorwise": "cuBLASLt, one scale"}
_NAMES |= {"cublaslt_block": "cuBLASLt, scale blocks", "torch_bf16": "bf16, torch"}
_COLOURS = {"": "#c0392b", "deepgemm": "#2c6fbb", "cublaslt_tensorwise": "#8a8a8a"}
_COLOURS |= {"cublaslt_block": "#c8a02c", "torch_bf16": "#6aa84f"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot", description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=FOLDER)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args(argv)
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]

        matplotlib.use("svg")
    except ModuleNotFoundError as error:
        print(f"plot needs {error.name}: pip install -e '.[bench]'")
        return 1
    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"  # the same file from the same results
    arguments.out.mkdir(parents=True, exist_ok=True)
    documents = {name: load(name, arguments.results) for name in (*BARS, *CURVES)}
    found = {name: document for name, document in documents.items() if document is not None}
    for name, figure in _figures(found).items():
        path = arguments.out / f"{name}.svg"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        print(path)
    return 0


def _figures(documents: Mapping[str, Document]) -> dict[str, Any]:
    figures = {name: _bars(name, documents[name]) for name in BARS if name in documents}
    for name, label in CURVES.items():
        if name in documents:
            figures[name] = _curve(documents[name], label)
    if figures:
        figures["roofline"] = _roofline({n: d for n, d in documents.items() if n in BARS})
    return figures


def _bars(name: str, document: Document) -> Any:
    """Of every row: the share of the speed that memory or tensor cores allow, ours and peers'."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    rows = document["rows"]
    peers = ["", *(peer for peer in peers_of(rows) if peer in _NAMES)]
    figure = Figure(figsize=(max(6.0, 0.42 * len(rows) + 2), 3.6))
    axes = figure.add_subplot()
    width = 0.84 / len(peers)
    for i, peer in enumerate(peers):
        heights = [_share(row, peer) for row in rows]
        places = [j + (i - (len(peers) - 1) / 2) * width for j in range(len(rows))]
        axes.bar(places, heights, width, label=_NAMES[peer], color=_COLOURS[peer])
    labels = labels_of(rows)
    titles = ["x".join(str(row[label]) for label in labels if label in row) for row in rows]
    axes.set_xticks(range(len(rows)), titles, rotation=90, fontsize=6)
    axes.set_xlabel(" x ".join(labels))
    axes.set_ylabel("share of the roofline")
    axes.set_title(name.replace("_", " "))
    axes.legend(fontsize=7, ncols=len(peers), loc="upper center", bbox_to_anchor=(0.5, 1.25))
    return figure


def _share(row: Row, peer: str) -> float:
    us = row["peers"].get(peer) if peer else row["us"]
    floor = max(row["hbm_fraction"], row["tensor_fraction"]) * row["us"]
    return floor / us if us else 0.0


def _tflops(row: Row, peer: str) -> float | None:
    us = row["peers"].get(peer) if peer else row["us"]
    return None if us is None else row["tflops"] * row["us"] / us


def _curve(document: Document, label: str) -> Any:
    """Times over one label, on two logarithmic axes."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    rows = [row for row in document["rows"] if not row.get("empty")]
    figure = Figure(figsize=(6.0, 3.6))
    axes = figure.add_subplot()
    for peer in ("", *(peer for peer in peers_of(rows) if peer in _NAMES)):
        times = [(row[label], row["peers"].get(peer) if peer else row["us"]) for row in rows]
        points = sorted((x, us) for x, us in times if us is not None)
        axes.loglog(*zip(*points, strict=True), "o-", ms=3, c=_COLOURS[peer], label=_NAMES[peer])
    axes.set_xlabel(label)
    axes.set_ylabel("us")
    axes.legend(fontsize=7)
    return figure


def _roofline(documents: Mapping[str, Document]) -> Any:
    """TFLOPS over FLOP a byte, ours and DeepGEMM's, under the two ceilings."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(6.0, 4.0))
    axes = figure.add_subplot()
    gbps = max(document["copy_gbps"] for document in documents.values())
    for peer in ("deepgemm", ""):
        points = [
            (row["tflops"] * 1e3 / row["gbps"], tflops)
            for document in documents.values()
            for row in document["rows"]
            if (tflops := _tflops(row, peer)) is not None
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=10, c=_COLOURS[peer], label=_NAMES[peer])
    ridge = FP8_TFLOPS * 1e3 / gbps
    axes.plot([1, ridge, 1e4], [gbps / 1e3, FP8_TFLOPS, FP8_TFLOPS], c="black", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOPS")
    axes.legend(fontsize=7)
    return figure
