"""The table on the terminal and the JSON file."""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.problem import Shape

_PACKAGES = (
    *("jax_fp8gemm", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cuda-nvrtc", "nvidia-cublas", "torch", "deep_gemm", "tokamax"),
)

_TEXT_LABELS = ("mode", "sums", "layer", "name")  # columns of words; the others hold numbers


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    labels: what was measured, by column: m, n, k and what the family adds.
    shape: the same for grouping rows.
    peers: microseconds by name, of the peers that ran.
    hbm_fraction, tensor_fraction: floor over time.
    deepgemm_estimate: microseconds carried over from the reference machine (`reference`).
    extra: further figures, for the JSON file only.
    """

    family: str
    labels: Mapping[str, Any]
    shape: Shape
    us: float
    tflops: float
    gbps: float
    hbm_fraction: float
    tensor_fraction: float
    config: str
    peers: Mapping[str, float]
    deepgemm_estimate: float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            **self.labels,
            "us": round(self.us, 3),
            "tflops": round(self.tflops, 1),
            "gbps": round(self.gbps, 1),
            "config": self.config,
            "peers": {name: round(us, 3) for name, us in self.peers.items()},
            "hbm_fraction": round(self.hbm_fraction, 4),
            "tensor_fraction": round(self.tensor_fraction, 4),
            "deepgemm_estimate": _rounded(self.deepgemm_estimate),
            **self.extra,
        }


class Table:
    """Prints rows under one header, as they come. A peer's ratio is its time over ours."""

    def __init__(self, labels: Sequence[str], peers: Sequence[str]):
        self._labels = list(labels)
        self._peers = [*peers, "deepgemm_estimate"] if peers else []

    def header(self) -> str:
        labels = "".join(f"{name:>{_width(name)}}" for name in self._labels)
        metrics = f"{'us':>10}{'TFLOPS':>8}{'GB/s':>7}{'HBM':>6}{'tensor':>8}  {'config':<34}"
        return labels + metrics + "".join(f"{name:>21}" for name in self._peers)

    def line(self, row: Row) -> str:
        labels = "".join(f"{str(row.labels[name]):>{_width(name)}}" for name in self._labels)
        metrics = (
            f"{row.us:10.2f}{row.tflops:8.0f}{row.gbps:7.0f}{row.hbm_fraction:6.0%}"
            f"{row.tensor_fraction:8.0%}  {row.config:<34}"
        )
        times = {**row.peers, "deepgemm_estimate": row.deepgemm_estimate}
        return labels + metrics + "".join(_peer_cell(times.get(p), row.us) for p in self._peers)


def _width(label: str) -> int:
    return 20 if label in _TEXT_LABELS else max(8, len(label) + 2)


def _peer_cell(us: float | None, ours: float) -> str:
    return f"{f'{us:.2f} ({us / ours:.2f}x)' if us else '-':>21}"


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def document(device: str, copy_gbps: float | None, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of a results file."""
    return {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "versions": _versions(),
        "copy_gbps": None if copy_gbps is None else round(copy_gbps),
        "rows": [row.to_json() for row in rows],
    }


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a results file, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in content.items() if key != "rows"}
    rows = ",\n".join(" " + json.dumps(row) for row in content["rows"])
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n')


def results_path(folder: str, device: str, family: str) -> pathlib.Path:
    """`<folder>/<device>/<family>.json`, the device in lower case with underscores."""
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return pathlib.Path(folder, slug, f"{family}.json")


def _commit() -> str | None:
    """The source tree's commit, with a + if files differ from it; None outside a checkout."""
    folder = pathlib.Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if dirty else "")


def _git(folder: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = pathlib.Path("/proc/driver/nvidia/version")
    if driver.exists() and (found := re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text())):
        versions["driver"] = found.group()
    return versions
