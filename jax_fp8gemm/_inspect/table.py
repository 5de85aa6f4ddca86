"""Table: records of numbers, as text, as HTML and as dictionaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_fp8gemm._runtime.html_table import html_table


def cell(value: Any) -> str:
    """Returns a value of a record as text: numbers to three digits, None as "-"."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def text_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each record below a line of names, in columns of equal width."""
    lines = _cells(records)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def html_of(caption: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Returns text_table as an HTML table."""
    return html_table(caption, _cells(records))


def _cells(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    if not records:
        return []
    return [list(records[0]), *([cell(value) for value in r.values()] for r in records)]
