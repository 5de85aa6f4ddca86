"""What is slower in one results file than in another."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import overlap

# What tells rows of a file apart: all labels, and none of the figures.
_FIGURES = {
    *("us", "spread", "all_us", "tflops", "gbps", "config", "peers", "hbm_fraction", "timer"),
    *("tensor_fraction", "sm_mhz", "span_us", "joules", "other_us", "deepgemm_estimate"),
    *("build_seconds", "time_seconds", "regret"),
}


def compare_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each row that is slower by more than the noise of both runs, and one of the sum.

    A row without a spread, as older files have them, counts as its time alone.
    """
    before = {_key(row): row for row in old["rows"]}
    common = [(before[key], row) for row in new["rows"] if (key := _key(row)) in before]
    slower = [pair for pair in common if is_slower(*pair)]
    faster = [pair for pair in common if is_slower(*reversed(pair))]
    lines = [
        f"slower: {dict(_key(now))}: {was['us']:.2f} -> {now['us']:.2f} us "
        f"({now['us'] / was['us']:.3f}x)"
        for was, now in slower
    ]
    return [
        *lines,
        f"{len(common)} rows of both {old.get('commit')} and {new.get('commit')}: {len(slower)} "
        f"slower and {len(faster)} faster by more than the noise of both",
    ]


def is_slower(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return now["us"] > was["us"] and not overlap(_spread(was), _spread(now))


def _spread(row: Mapping[str, Any]) -> Sequence[float]:
    return row.get("spread", [row["us"], row["us"]])


def _key(row: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    is_figure = lambda key: key in _FIGURES or key.endswith("_bytes") or key.startswith("peers_")
    return tuple((key, value) for key, value in sorted(row.items()) if not is_figure(key))
