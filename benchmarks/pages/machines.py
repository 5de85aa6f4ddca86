"""How far several GPUs are apart: of each family, our speed over DeepGEMM's on each of them."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.pages.results import Document, Row, labels_of, load, ratio_of_products
from benchmarks.pages.tables import commit_text, markdown
from benchmarks.summary import geometric_mean

_PEER = "deepgemm"
_FEWEST = 2  # one machine has no spread
_VERSIONS = ("driver", "jax", "torch", "deep_gemm")


def machines_section(prefix: str = "") -> str:
    """A section of a page; empty with fewer than two machines."""
    document = load(f"{prefix}machines")
    machines = document["machines"] if document else []
    if document is None or len(machines) < _FEWEST:
        return ""
    families = dict.fromkeys(row["family"] for row in document["rows"])
    lines = [line for family in families if (line := _line(family, document["rows"]))]
    header = ("family", "machines", "rows", "least", "median", "greatest", "same side of 1")
    text = (
        f"{len(machines)} GPUs of one kind ran our products beside DeepGEMM's, each by itself. A "
        "machine's ratio is the geometric mean over the rows of DeepGEMM's time over ours. The "
        "last column counts the rows in which the same one of the two is faster on all machines. "
        "A machine is named by a hash of its GPU's UUID."
    )
    parts = ["## Several machines", text, markdown(header, lines), _list_of(machines)]
    return "\n\n".join(parts)


def spread_text(family: str, prefix: str = "") -> str:
    """The least and the greatest ratio of a machine; empty with fewer than two machines."""
    document = load(f"{prefix}machines")
    means = _means(_by_machine(family, document["rows"] if document else ()))
    if len(means) < _FEWEST:
        return ""
    return f"{min(means):.2f}x to {max(means):.2f}x on {len(means)} GPUs"


def _line(family: str, rows: Sequence[Row]) -> Sequence[object] | None:
    """The family's line of the table; None where fewer than two machines have it."""
    ratios = _by_machine(family, rows)
    means = _means(ratios)
    if len(means) < _FEWEST:
        return None
    num_same = sum(len({_side(r) for r in of}) == 1 for of in zip(*ratios, strict=True))
    extremes = [f"{of(means):.3f}" for of in (min, statistics.median, max)]
    return [family, len(means), len(ratios[0]), *extremes, f"{num_same} rows"]


def _by_machine(family: str, rows: Iterable[Row]) -> list[list[float]]:
    """Of each machine the ratios of those rows that all of these machines have, in one order."""
    of_family = (row for row in rows if row["family"] == family)
    own = [(row, value) for row in of_family if (value := ratio_of_products(row, _PEER))]
    labels = [label for label in labels_of([row for row, _ in own]) if label != "machine"]
    found: dict[str, dict[tuple[object, ...], float]] = {}
    for row, value in own:
        key = tuple(row.get(label) for label in labels)
        found.setdefault(row["machine"], {})[key] = value
    common = [
        key for key in next(iter(found.values()), ()) if all(key in of for of in found.values())
    ]
    return [[of[key] for key in common] for of in found.values()]


def _means(ratios: Iterable[Sequence[float]]) -> list[float]:
    return [mean for of in ratios if (mean := geometric_mean(of)) is not None]


def _side(value: float) -> int:
    return (value > 1) - (value < 1)


def _list_of(machines: Sequence[Document]) -> str:
    """What each machine ran with."""
    header = ("machine", "date", "commit", "GB/s of a copy", "rounds", *_VERSIONS)
    lines = []
    for machine in machines:
        versions = (machine["versions"].get(name, "") for name in _VERSIONS)
        how = machine["copy_gbps"], machine["rounds"]
        lines.append(
            [f"`{machine['machine']}`", machine["date"], commit_text(machine), *how, *versions]
        )
    return markdown(header, lines)
