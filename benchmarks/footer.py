"""The lines under a table."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.report import Row
from benchmarks.summary import compare_with_peers, variant_of

# Keys of a row's figures, or their ends.
_PEAK, _MOVED, _BESIDE = "peak_bytes", "moved_bytes", "products_beside"


def footer(rows: Sequence[Row], device: str, copy_gbps: float, num_sms: int) -> list[str]:
    lines = [
        f"{device}: floors at {copy_gbps:.0f} GB/s (a copy, measured now) and {num_sms} SMs * 8192 "
        "FLOP/clock * 1.83 GHz; a peer's ratio is its time over ours, with ~ where the rounds' "
        "medians overlap; us counts our kernel, all us every kernel of the call"
    ]
    if any(row.ours.timer == "host" for row in rows):
        lines.append(
            "NOTE: no CUPTI, so these are host times of calls queued back to back without a flush: "
            "short rows show the launch, not the kernel"
        )
    lines += compare_with_peers(rows)
    lines += _program_lines(rows, "peak memory of", _PEAK, lambda value: f"{value / 1e9:.2f}", "GB")
    lines += _program_lines(rows, "moved by", _MOVED, _moved_text, "GB")
    lines += _program_lines(rows, "beside collectives of", _BESIDE, _beside_text, "products")
    return lines + _absent_lines(rows)


def _absent_lines(rows: Sequence[Row]) -> list[str]:
    """Why peers have no time, each reason once."""
    reasons = [(name, reason) for row in rows for name, reason in row.absent.items()]
    counts = itertools.groupby(sorted(reasons))
    return [f"{name}: absent in {len(list(of))} rows: {why}" for (name, why), of in counts]


def _program_lines(
    rows: Sequence[Row], what: str, key: str, text_of: Callable[[Any], str], unit: str
) -> list[str]:
    """A figure of each program, ours and the peers', where it is known."""
    lines = []
    for row in rows:
        texts = [
            f"{name.removesuffix(key).removesuffix('_') or 'ours'} {text_of(value)}"
            for name, value in row.extra.items()
            if name.endswith(key)
        ]
        if texts:
            title = f"{row.labels.get('name', row.shape)}{variant_of(row)}"
            lines.append(f"{what} {title}, {unit}: {', '.join(texts)}")
    return lines


def _moved_text(moved: Mapping[str, int]) -> str:
    """Without what rounds to nothing."""
    texts = [f"{kind} {count / 1e9:.3f}" for kind, count in moved.items() if count >= 5e5]
    return f"[{'; '.join(texts)}]"


def _beside_text(beside: Mapping[str, Sequence[int]]) -> str:
    """A number for each collective."""
    return f"[{'; '.join(' '.join([kind, *map(str, of)]) for kind, of in beside.items())}]"
