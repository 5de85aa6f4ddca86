"""The tables of docs/conformance.md, between two marks that the page has."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections import defaultdict
from pathlib import Path

from limits import KINDS, Limit, Verdict

BEGIN, END = "<!-- begin: written by make conformance -->", "<!-- end -->"
PACKAGES = ("jax", "flax", "tokamax", "maxtext", "numpy")
TITLES = {
    "design": "What FP8 products are not",
    "test": "What a test asks of JAX's own text, types or internals",
    "open": "Ours to mend",
}
# A limit of more cases than these names its first ones.
NUM_NAMES = 4


def summary(suite: str, verdict: Verdict) -> str:
    limited = sum(map(len, verdict.limited.values()))
    return (
        f"{suite}: {verdict.num_cases} cases: {len(verdict.passed)} passed, {limited} limited, "
        f"{len(verdict.faults)} faults; skipped {len(verdict.skipped)}, "
        f"without a product of ours {len(verdict.untouched)}"
    )


def write(page: Path, verdicts: dict[str, Verdict]) -> None:
    """Replaces what is between the marks."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n\n".join([_header(), _counts(verdicts), *_limits(verdicts)])
    page.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")


def _header() -> str:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{datetime.date.today()}, on CPU: {', '.join(versions)}."


def _counts(verdicts: dict[str, Verdict]) -> str:
    rows = ["| suite | cases | passed | limited | skipped | no product |", "| --- " * 6 + "|"]
    totals = [0] * 5
    for name, verdict in verdicts.items():
        passed, skipped, untouched = map(len, (verdict.passed, verdict.skipped, verdict.untouched))
        row = (verdict.num_cases, passed, verdict.num_cases - passed, skipped, untouched)
        totals = [x + y for x, y in zip(totals, row, strict=True)]
        rows.append(f"| {name} | {' | '.join(map(str, row))} |")
    return "\n".join([*rows, f"| all | {' | '.join(map(str, totals))} |"])


def _limits(verdicts: dict[str, Verdict]) -> list[str]:
    cases: dict[Limit, list[str]] = defaultdict(list)
    for verdict in verdicts.values():
        for limit, names in verdict.limited.items():
            cases[limit] += names
    sections = []
    for kind in KINDS:
        of_kind = [(limit, names) for limit, names in cases.items() if limit.kind == kind]
        if not of_kind:
            continue
        of_kind.sort(key=lambda item: -len(item[1]))
        num_cases = sum(len(names) for _, names in of_kind)
        rows = [
            f"### {TITLES[kind]}: {num_cases}",
            "",
            "| cases | reason | which |",
            "| --- " * 3 + "|",
        ]
        rows += [f"| {len(names)} | {limit.reason} | {_names(names)} |" for limit, names in of_kind]
        sections.append("\n".join(rows))
    return sections


def _names(names: list[str]) -> str:
    short = sorted({name.rpartition("::")[2] for name in names})
    more = f" and {len(short) - NUM_NAMES} more" if len(short) > NUM_NAMES else ""
    return ", ".join(f"`{name.replace('|', '/')}`" for name in short[:NUM_NAMES]) + more
