"""Reads results files, and what follows from their rows."""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.provenance import ROOT
from benchmarks.report import overlap
from benchmarks.summary import geometric_mean

FOLDER = ROOT / "benchmarks" / "results" / "nvidia_h200"
# Tables whose names begin with this are of H100s.
H100 = "h100_"
_H100_FOLDER = FOLDER.parent / "nvidia_h100_80gb_hbm3"
Row = Mapping[str, Any]
Document = Mapping[str, Any]
Ratio = Callable[[Row, str], float | None]


def load(table: str, folder: pathlib.Path | None = None) -> Document | None:
    """A results file, or None if there is none of that name."""
    file = file_of(table, folder)
    return json.loads(file.read_text()) if file.is_file() else None


def file_of(table: str, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Where a table's rows are; those of H200s in `folder`, if it is given."""
    if table.startswith(H100):
        return _H100_FOLDER / f"{table.removeprefix(H100)}.json"
    return (folder or FOLDER) / f"{table}.json"


def labels_of(rows: Sequence[Row]) -> list[str]:
    """What tells rows apart: the keys between the family and the time."""
    labels: dict[str, None] = {}
    for row in rows:
        for key in row:
            if key == "us":
                break
            labels[key] = None
    labels.pop("family", None)
    return list(labels)


def peers_of(rows: Sequence[Row]) -> list[str]:
    """Of which some row has a time, or a reason why it has none."""
    names = (name for row in rows for key in ("peers", "peers_absent") for name in row.get(key, {}))
    return list(dict.fromkeys(names))


def ratio(row: Row, peer: str) -> float | None:
    """The peer's time over ours: above 1 we are faster."""
    us = row.get("peers", {}).get(peer)
    return None if us is None else us / row["us"]


def ratio_of_products(row: Row, peer: str) -> float | None:
    """As `ratio`, but of our call that leaves unused rows as they are, where a row has timed it.

    That is what the peers do. Where our kernel clears such rows too, it does more than theirs.
    """
    us = row.get("peers", {}).get(peer)
    return None if us is None else us / row["peers"].get("unused_undefined", row["us"])


def all_us(row: Row, peer: str | None = None) -> float | None:
    """Every kernel of our call, or of the peer's."""
    if peer is None:
        return row.get("all_us", row["us"])
    return row.get("peers_all_us", {}).get(peer, row["peers"].get(peer))


def ratio_of_all(row: Row, peer: str) -> float | None:
    """As `ratio`, of every kernel of both calls: what is cleared and copied counts."""
    theirs, ours = all_us(row, peer), all_us(row)
    return None if theirs is None or ours is None else theirs / ours


def has_other_kernels(rows: Iterable[Row]) -> bool:
    """Whether our calls run others that take a fiftieth of the time or more."""
    return any((all_us(row) or 0) > 1.02 * row["us"] for row in rows)


def is_within_noise(row: Row, peer: str) -> bool:
    """Whether the rounds' medians overlap. A row without rounds, of an older file, never is."""
    theirs = row.get("peers_spread", {}).get(peer)
    return theirs is not None and overlap(row["spread"], theirs)


def mean_ratio(rows: Iterable[Row], peer: str, of: Ratio = ratio) -> float | None:
    return geometric_mean(r for row in rows if (r := of(row, peer)) is not None)


def find(table: str, **labels: Any) -> Row | None:
    """The first row of a file with these labels, if there is one."""
    document = load(table)
    for row in document["rows"] if document else ():
        if all(row.get(key) == value for key, value in labels.items()):
            return row
    return None
