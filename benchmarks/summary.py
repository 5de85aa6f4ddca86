"""Means over rows: our speed over each peer's, by size class."""

import math
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.problem import Shape
from benchmarks.report import Row

# Labels that are dimensions. The others tell apart rows of one shape.
_DIMENSIONS = (
    *("m", "n", "k", "hidden", "inter"),
    *("name", "groups", "expected_rows", "rows", "max_m", "expected_k", "gpus"),
    *("experts", "top_k", "sizes", "empty"),
)


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def compare_with_peers(rows: Sequence[Row]) -> list[str]:
    """A line for each peer and size class; a ratio is the peer's time over ours."""
    lines = []
    for name in dict.fromkeys(name for row in rows for name in row.peers):
        for variant in sorted({variant_of(row) for row in rows}):
            own = [row for row in rows if variant_of(row) == variant and name in row.peers]
            ratios = {row.shape: row.peers[name].us / row.ours.us for row in own}
            noisy = {row.shape for row in own if row.is_within_noise(name)}
            lines += summarise(ratios, f"{name}{variant}", noisy)
            if any(row.ours.other_us > 0.02 * row.ours.us for row in own):
                ratios = {row.shape: row.peers[name].all_us / row.ours.all_us for row in own}
                lines += summarise(ratios, f"{name}{variant}, every kernel of both calls", set())
    return lines


def summarise(ratios: Mapping[Shape, float], name: str, noisy: set[Shape]) -> list[str]:
    """A line for each size class that has rows: geometric mean and worst row of the ratios.

    noisy: rows in which neither is faster for certain.
    """
    classes: dict[str, list[Shape]] = {}
    for shape in sorted(ratios, key=lambda shape: -shape.m):
        if shape.size_class is not None:
            classes.setdefault(shape.size_class, []).append(shape)
    lines = []
    for label, shapes in classes.items():
        mean = geometric_mean(ratios[shape] for shape in shapes)
        worst = min(shapes, key=lambda shape: ratios[shape])
        lost = sum(ratios[shape] < 1 and shape not in noisy for shape in shapes)
        lines.append(
            f"{label}: {mean:.3f}x {name} (geometric mean of {len(shapes)} rows, {lost} of them "
            f"slower for certain), worst {ratios[worst]:.3f}x at {worst}"
        )
    return lines


def variant_of(row: Row) -> str:
    """What tells apart rows of one shape."""
    text = [f"{key}={value}" for key, value in row.labels.items() if key not in _DIMENSIONS]
    return f" ({', '.join(text)})" if text else ""
