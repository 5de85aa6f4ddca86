"""Tables of the documents, in markdown."""

import collections
from collections.abc import Iterable, Sequence

from benchmarks.pages.results import (
    Document,
    Ratio,
    Row,
    all_us,
    has_other_kernels,
    is_within_noise,
    labels_of,
    load,
    mean_ratio,
    peers_of,
    ratio,
    ratio_of_all,
)

# Results files by name, in the order of the page.
ONE_GPU = (
    *("dense", "wgrad", "ragged", "masked", "ragged_wgrad", "quantize", "matmul", "moe", "step"),
    *("model", "decode"),
    *("dense_held_out", "ragged_held_out", "masked_held_out", "dense_random", "ragged_random"),
    *("dense_sustained", "ragged_sustained", "matmul_sustained", "moe_sustained"),
    *("dense_short", "dense_short_read_flush", "dense_curve", "ragged_curve"),
    *("dense_narrow", "dense_narrow_read_flush"),
    *("dense_held_out_regret", "ragged_held_out_regret", "ragged_wgrad_regret", "host"),
)
_ALL_GPUS = ("fsdp", "expert_parallel", "expert_parallel_exchanges")
ALL_GPUS = tuple(f"{family}_x{num_gpus}" for num_gpus in (4, 2) for family in _ALL_GPUS)
_VERSIONS = ("jax", "deep_gemm", "cublasLt", "cudnn", "torch", "tokamax", "driver")


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])


def rows_table(table: str) -> str:
    """Every row of a file: our time with its spread, our speed, and each peer's time over ours."""
    document = load(table)
    if document is None:
        return f"No file `{table}.json` yet."
    rows = document["rows"]
    labels, peers = labels_of(rows), peers_of(rows)
    is_product = any(row.get("tflops") for row in rows)
    has_all = has_other_kernels(rows)
    header = [*labels, "us", *(["all us"] if has_all else [])]
    header += ["TFLOPS" if is_product else "GB/s"] if "gbps" in rows[0] else []
    lines = []
    for row in rows:
        cells = [_label(row.get(label)) for label in labels] + [_us(row)]
        cells += [f"{all_us(row):.1f}"] if has_all else []
        if "gbps" in row:
            cells.append(f"{row['tflops' if is_product else 'gbps']:.0f}")
        lines.append([*cells, *(_ratio(row, peer, has_all) for peer in peers)])
    return "\n".join([markdown([*header, *peers], lines), *_absent(rows)])


def _label(value: object) -> str:
    return "" if value is None else str(value)


def _us(row: Row) -> str:
    """The median, and half of what the rounds' medians differ by."""
    us = row["us"]
    if "spread" not in row:
        return f"{us:.1f}"
    low, high = row["spread"]
    return f"{us:.1f} ±{(high - low) / 2 / us:.1%}"


def _ratio(row: Row, peer: str, has_all: bool) -> str:
    """Of the kernels that count; then of every kernel, where ours runs more of them."""
    value = ratio(row, peer)
    if value is None:
        return "-"
    text = f"{value:.2f}{'~' if is_within_noise(row, peer) else ''}"
    return f"{text}, all {ratio_of_all(row, peer):.2f}" if has_all else text


def _absent(rows: Sequence[Row]) -> list[str]:
    """Why peers have no time, each reason once."""
    reasons = collections.Counter(
        (name, why) for row in rows for name, why in row.get("peers_absent", {}).items()
    )
    lines = [f"- `{name}` did not run in {num} rows: {why}" for (name, why), num in reasons.items()]
    return ["", *lines] if lines else []


def summary_table(prefix: str = "") -> str:
    """Of each file and peer: the mean ratio, and how many rows are won, lost, or neither."""
    lines = []
    for table in ONE_GPU:
        if (document := load(prefix + table)) is None or "regret" in table or table == "host":
            continue
        rows = document["rows"]
        for peer in peers_of(rows):
            if ran := [row for row in rows if ratio(row, peer) is not None]:
                lines.append([table, peer, *_means(ran, peer, ratio)])
                if has_other_kernels(rows):
                    name = f"{table}, every kernel"
                    lines.append([name, peer, *_means(ran, peer, ratio_of_all)])
    header = ("file", "peer", "rows", "mean", "lowest", "highest", "we win", "we lose", "noise")
    return markdown(header, lines)


def _means(rows: Sequence[Row], peer: str, of: Ratio) -> list[object]:
    ratios = [of(row, peer) or 0.0 for row in rows]
    # Of every kernel there is no spread.
    is_noise = [of is ratio and is_within_noise(row, peer) for row in rows]
    noise = sum(is_noise)
    won = sum(r > 1 and not unsure for r, unsure in zip(ratios, is_noise, strict=True))
    extremes = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    mean = f"{mean_ratio(rows, peer, of):.3f}"
    return [len(rows), mean, *extremes, won, len(rows) - won - noise, noise]


def regret_table(prefix: str = "") -> str:
    """What the choice of a tile config costs against the best one of the list."""
    lines: list[tuple[str, ...]] = []
    for table in ONE_GPU:
        if "regret" not in table or (document := load(prefix + table)) is None:
            continue
        for row in document["rows"]:
            best = min(row["peers"], key=lambda tile: row["peers"][tile])
            lost = row["us"] / row["peers"][best] - 1
            sizes = "x".join(str(row[key]) for key in labels_of([row]))
            lines.append((table, sizes, row["config"], best, f"{max(0.0, lost):.1%}"))
    header = ("file", "row", "chosen", "best", "slower by")
    lines.sort(key=lambda line: -float(line[-1].removesuffix("%")))
    return markdown(header, lines)


def files_table(prefix: str = "") -> str:
    """Where each file is from."""
    lines = []
    for table in (*ONE_GPU, *ALL_GPUS):
        if (document := load(prefix + table)) is not None:
            file = f"`{table}.json`"
            lines.append([file, document["date"], commit_text(document), *_how(document)])
    header = ("file", "date", "commit", "GB/s of a copy", "rounds", *_VERSIONS)
    return markdown(header, lines)


def commit_text(document: Document) -> str:
    """The commit of the sources, and whether they were changed."""
    return f"{document['commit']}{' with changes' if document.get('dirty') else ''}"


def _how(document: Document) -> list[object]:
    versions = document["versions"]
    rounds = document.get("rounds", "")
    copy = document.get("copy_gbps") or ""
    return [copy, rounds, *(versions.get(name, "") for name in _VERSIONS)]
