"""Tables of a folder of runs: the gap of each recipe to bf16, and what a step costs."""

import pathlib
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from run import read

LAST = 0.1  # the part of the steps whose losses are compared
BASE = "bf16"


class Run(NamedTuple):
    """A run that ended: its losses (steps,), its last held-out loss, and its first line."""

    losses: np.ndarray
    held_out: float
    start: dict[str, Any]
    tokens_per_s: float
    tflops: float


def summary(folder: pathlib.Path) -> str:
    """Returns two Markdown tables of the runs NAME-SEED below a folder that came to their end.

    A gap is the mean loss of the last tenth of the steps minus that of bf16 with the same seed. Its
    error is the standard error of the mean over seeds. The gap on held-out text is that of the last
    evaluation.
    """
    runs = _read(folder)
    if BASE not in runs:
        raise FileNotFoundError(f"summary: no run {BASE}-SEED that ended below {folder}")
    gaps = ["| recipe | seeds | loss | gap | of the loss | held-out gap |", "|" + " --- |" * 6]
    costs = ["| recipe | tokens a second | TFLOPS a device | peak GB |", "|" + " --- |" * 4]
    for name, seeds in runs.items():
        gaps.append(_gap(name, seeds, runs[BASE]))
        middle = lambda x, of=seeds: np.median([getattr(run, x) for run in of.values()])
        peak = next(iter(seeds.values())).start["peak_bytes"] / 1e9
        row = name, f"{middle('tokens_per_s'):.0f}", f"{middle('tflops'):.0f}", f"{peak:.1f}"
        costs.append("| " + " | ".join(row) + " |")
    base = [_last(run) for run in runs[BASE].values()]
    spread = f"{np.std(base, ddof=1):.4f}" if len(base) > 1 else "unknown: one seed"
    told = f"Standard deviation of the loss of {BASE} over {len(base)} seeds: {spread}."
    return "\n".join([*gaps, "", told, "", *costs])


def _gap(name: str, seeds: dict[str, Run], base: dict[str, Run]) -> str:
    common = sorted(set(seeds) & set(base))
    loss = np.mean([_last(run) for run in seeds.values()])
    trained = [_last(seeds[seed]) - _last(base[seed]) for seed in common]
    held_out = [seeds[seed].held_out - base[seed].held_out for seed in common]
    share = f"{100 * np.mean(trained) / loss:+.2f} %" if common else "-"
    row = name, str(len(seeds)), f"{loss:.4f}", _mean(trained), share, _mean(held_out)
    return "| " + " | ".join(row) + " |"


def _mean(values: list[float]) -> str:
    """Returns the mean and, of two or more, its standard error."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:+.4f}"
    return f"{np.mean(values):+.4f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.4f}"


def _last(run: Run) -> float:
    return float(np.mean(run.losses[-max(1, round(LAST * len(run.losses))) :]))


def _read(folder: pathlib.Path) -> dict[str, dict[str, Run]]:
    """Returns the runs that ended, by recipe and seed; bf16 first."""
    found: dict[str, dict[str, Run]] = defaultdict(dict)
    for file in sorted(folder.rglob("metrics.jsonl")):
        lines = list(read(file))
        of = {kind: [line for line in lines if line["kind"] == kind] for kind in _KINDS}
        if not of["end"]:
            continue
        name, _, seed = file.parent.name.rpartition("-")
        steps = of["step"]
        middle = lambda key, steps=steps: float(np.median([step[key] for step in steps]))
        found[name][seed] = Run(
            losses=np.array([step["loss"] for step in steps]),
            held_out=of["evaluation"][-1]["loss"],
            start=of["start"][-1],
            tokens_per_s=middle("tokens_per_s"),
            tflops=middle("tflops"),
        )
    return dict(sorted(found.items(), key=lambda item: (item[0] != BASE, item[0])))


_KINDS = ("start", "step", "evaluation", "end")
