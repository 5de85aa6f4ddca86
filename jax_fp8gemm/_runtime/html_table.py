"""Tables for notebooks: what `_repr_html_` of our classes returns."""

import html
from collections.abc import Iterable, Sequence


def html_table(caption: str, rows: Iterable[Sequence[object]]) -> str:
    """Returns a table with a row for each of `rows`, whose first cell is its heading. Escapes."""
    lines = []
    for heading, *cells in rows:
        tags = [f"<th>{_text(heading)}</th>", *(f"<td>{_text(cell)}</td>" for cell in cells)]
        lines.append(f"<tr>{''.join(tags)}</tr>")
    return f"<table><caption>{_text(caption)}</caption>{''.join(lines)}</table>"


def _text(cell: object) -> str:
    return html.escape(str(cell))
