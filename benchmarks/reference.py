"""Figures of DeepGEMM measured beside cuBLASLt elsewhere, carried over to this run.

DeepGEMM needs nvcc, so it is rarely there to be timed. Its time is estimated as its ratio to
cuBLASLt tensor-wise on the reference machine, times cuBLASLt tensor-wise in this run (bf16 where
the reference has no tensor-wise figure): clocks and drivers cancel, the GPU model must agree.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.problem import GroupedShape, Shape

# (key in the reference, key among this run's peers), best first.
_YARDSTICKS = (("cublaslt_tensorwise", "cublaslt_tensorwise"), ("bf16", "torch_bf16"))
# Tables without cuBLASLt's times, and the dense rows whose cuBLASLt times carry their figures over.
CARRIED = ("wgrad", "ragged", "masked", "ragged_wgrad")
CALIBRATION = (Shape(4096, 4096, 7168), Shape(4096, 7168, 2048), Shape(8192, 8192, 8192))


@dataclasses.dataclass(frozen=True)
class Reference:
    """The file's tables: family ("dense", "dense_sustained" or one of CARRIED) -> rows."""

    tables: Mapping[str, Any]

    def row(self, family: str, shape: Shape) -> Mapping[str, Any]:
        """The family's row of that shape, or an empty one."""
        for row in self.tables.get(family, ()):
            if _shape(row) == shape:
                return row
        return {}

    def deepgemm_us(
        self,
        family: str,
        shape: Shape,
        peers: Mapping[str, float],
        machine: float | None = None,
        flop: int = 0,
    ) -> float | None:
        """DeepGEMM's estimated time here, or None without a reference row or a yardstick.

        peers: this run's times, by name.
        machine: time here over time there, for rows without a yardstick of their own.
        flop: of this run's row; groups drawn elsewhere had others.
        """
        row = self.row(family, shape)
        deepgemm = row.get("deepgemm")
        if deepgemm is None:
            return None
        for there, here in _YARDSTICKS:
            yardstick = row.get(there)
            if yardstick is not None:
                return deepgemm * peers[here] / yardstick if here in peers else None
        if machine is None:
            return None
        return deepgemm * machine * (flop / _grouped_flop(row) if "groups" in row else 1)

    def machine_factor(self, measured: Mapping[Shape, float]) -> float | None:
        """Geometric mean of cuBLASLt tensor-wise here over there, over dense shapes."""
        there = {shape: self.row("dense", shape).get("cublaslt_tensorwise") for shape in measured}
        return geometric_mean(us / base for shape, us in measured.items() if (base := there[shape]))


def _shape(row: Mapping[str, Any]) -> Shape:
    if "groups" not in row:
        return Shape(row["m"], row.get("n"), row["k"])
    m, k = row.get("expected_rows", row.get("m")), row.get("expected_k", row["k"])
    return GroupedShape(m, row["n"], k, row["groups"])


def _grouped_flop(row: Mapping[str, Any]) -> int:
    return 2 * row.get("rows", row.get("m")) * row["n"] * row["k"]


def load_reference(path: str | None = None) -> Reference | None:
    """Reads a reference file; by default the source tree's, or None if there is none.

    Raises: FileNotFoundError if `path` is given and absent.
    """
    if path is not None:
        return Reference(json.loads(pathlib.Path(path).read_text()))
    root = pathlib.Path(__file__).resolve().parents[1]
    for folder in (root, pathlib.Path.cwd()):
        file = folder / "benchmarks" / "h200_peers.json"
        if file.exists():
            return Reference(json.loads(file.read_text()))
    return None


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def summarise(ratios: Mapping[Shape, float], name: str) -> list[str]:
    """A line for each size class that has rows: geometric mean and worst row of the ratios."""
    classes: dict[str, list[Shape]] = {}
    for shape in sorted(ratios, key=lambda shape: -shape.m):
        if shape.size_class is not None:
            classes.setdefault(shape.size_class, []).append(shape)
    lines = []
    for label, shapes in classes.items():
        mean = geometric_mean(ratios[shape] for shape in shapes)
        worst = min(shapes, key=lambda shape: ratios[shape])
        lines.append(
            f"{label}: {mean:.3f}x {name} (geometric mean of {len(shapes)} rows), "
            f"worst {ratios[worst]:.3f}x at {worst}"
        )
    return lines
