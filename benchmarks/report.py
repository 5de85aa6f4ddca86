"""The table on the terminal and the JSON file."""

import dataclasses
import datetime
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.problem import Shape, Work
from benchmarks.provenance import source_commit, versions
from benchmarks.timing.nvml import gpu_hash
from benchmarks.timing.rounds import Timing

_TEXT_LABELS = ("mode", "sums", "layer", "name")  # columns of words


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    labels: what was measured, by column: m, n, k and what the family adds.
    shape: the same for grouping rows.
    ours, peers: times; of the peers that ran, by name.
    absent: why a peer has no time here, by name.
    extra: further figures, for the JSON file only.
    """

    family: str
    labels: Mapping[str, Any]
    shape: Shape
    work: Work
    hbm_fraction: float
    tensor_fraction: float
    config: str
    ours: Timing
    peers: Mapping[str, Timing] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def is_within_noise(self, peer: str) -> bool:
        """Whether the medians of our rounds and the peer's overlap: neither is faster for sure."""
        return overlap(self.ours.spread, self.peers[peer].spread)

    def to_json(self) -> dict[str, Any]:
        ours = self.ours
        peers = self.peers.items()
        content = {
            "family": self.family,
            **self.labels,
            "us": round(ours.us, 3),
            "spread": [round(us, 3) for us in ours.spread],
            "all_us": round(ours.all_us, 3),
            "tflops": round(self.work.tflops(ours.us), 1),
            "gbps": round(self.work.gbps(ours.us), 1),
            "config": self.config,
            "peers": {name: round(t.us, 3) for name, t in peers},
            "peers_spread": {name: [round(us, 3) for us in t.spread] for name, t in peers},
            "peers_all_us": {name: round(t.all_us, 3) for name, t in peers if t.other_us},
            "peers_absent": dict(self.absent),
            "hbm_fraction": round(self.hbm_fraction, 4),
            "tensor_fraction": round(self.tensor_fraction, 4),
            "timer": ours.timer,
        }
        for field in ("span_us", "sm_mhz", "joules"):
            of_peers = {n: round(v, 4) for n, t in peers if (v := getattr(t, field)) is not None}
            if (value := getattr(ours, field)) is not None:
                content[field] = round(value, 4)
                content[f"peers_{field}"] = of_peers
        if len(ours.kernels) > 1 and not ours.other_us:  # all of them count
            content["kernels"] = {name: round(us, 2) for name, us in ours.kernels.items()}
        return content | dict(self.extra)


class Table:
    """Prints rows under one header, as they come. A peer's ratio is its time over ours.

    A ratio ends in ~ where the medians of the rounds overlap: neither is faster for certain.
    """

    def __init__(self, labels: Sequence[str], peers: Sequence[str]):
        self._labels = list(labels)
        self._peers = list(peers)

    def header(self) -> str:
        labels = "".join(f"{name:>{_width(name)}}" for name in self._labels)
        metrics = f"{'us':>10}{'all us':>10}{'TFLOPS':>8}{'GB/s':>7}{'HBM':>6}{'tensor':>8}"
        return labels + metrics + f"  {'config':<34}" + "".join(f"{p:>22}" for p in self._peers)

    def line(self, row: Row) -> str:
        labels = "".join(
            f"{str(row.labels.get(name, '')):>{_width(name)}}" for name in self._labels
        )
        us = row.ours.us
        metrics = (
            f"{us:10.2f}{row.ours.all_us:10.2f}{row.work.tflops(us):8.0f}{row.work.gbps(us):7.0f}"
            f"{row.hbm_fraction:6.0%}{row.tensor_fraction:8.0%}  {row.config:<34}"
        )
        return labels + metrics + "".join(_peer_cell(row, name) for name in self._peers)


def _width(label: str) -> int:
    return 20 if label in _TEXT_LABELS else max(8, len(label) + 2)


def _peer_cell(row: Row, name: str) -> str:
    if (timing := row.peers.get(name)) is None:
        return f"{'-':>22}"
    mark = "~" if row.is_within_noise(name) else " "
    return f"{f'{timing.us:.2f} ({timing.us / row.ours.us:.2f}x){mark}':>22}"


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return min(a) <= max(b) and min(b) <= max(a)


def document(
    device: str, how: Mapping[str, Any], rows: Sequence[Row], failed: Sequence[Any] = ()
) -> dict[str, Any]:
    """The content of a results file.

    how: what was chosen for the whole run: rounds, seed, flush, the bandwidth of a copy.
    failed: rows that our own kernels did not run, as {"family", labels..., "error"}.
    """
    return {
        "device": device,
        "machine": gpu_hash(),
        "date": datetime.date.today().isoformat(),
        **source_commit(),
        "versions": versions(),
        **how,
        "failed_rows": list(failed),
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
