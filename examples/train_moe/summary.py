"""Tables of a folder of runs: the gap of each recipe to bf16, and what a step costs."""

import pathlib
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from controls import CONTROLS
from metrics import read

LAST = 0.1  # the part of the steps whose losses are compared
BASE, AGAIN, OURS = "bf16", "bf16_again", "deepseek_v3"


class Run(NamedTuple):
    """A run that ended: its mean loss of the last tenth of the steps, its last held-out loss, its
    first line, and its medians."""

    loss: float
    held_out: float
    start: dict[str, Any]
    tokens_per_s: float
    tflops: float


def summary(folder: pathlib.Path) -> str:
    """Returns two Markdown tables of the runs NAME-SEED below a folder that came to their end.

    A gap is how far a loss is above that of bf16 with the same seed, in percent, and its error is
    the standard error of the mean over seeds. A control separates if its gap is larger than 2
    errors, and so is how far it is above deepseek_v3. The gap of bf16_again is that of no change.
    """
    runs = _read(folder)
    if BASE not in runs:
        raise FileNotFoundError(f"summary: no run {BASE}-SEED that ended below {folder}")
    heads = "recipe", "seeds", "loss", "gap, %", "held-out gap, %", f"above {OURS}, %", "separates"
    gaps = [_row(heads), "|" + " --- |" * len(heads)]
    gaps += [_row(_gap(name, runs)) for name in runs]
    costs = ["| recipe | tokens a second | TFLOPS a device | peak GB |", "|" + " --- |" * 4]
    for name, seeds in runs.items():
        middle = lambda x, of=seeds: np.median([getattr(run, x) for run in of.values()])
        peak = next(iter(seeds.values())).start["peak_bytes"] / 1e9
        row = name, f"{middle('tokens_per_s'):.0f}", f"{middle('tflops'):.0f}", f"{peak:.1f}"
        costs.append(_row(row))
    base = [run.loss for run in runs[BASE].values()]
    told = f"Standard deviation of the loss of {BASE} over seeds: {_spread(base, np.mean(base))}."
    if AGAIN in runs:
        pairs = _shares(runs, AGAIN, BASE, "loss")
        told += f" Of the gap of {AGAIN}: {_spread(pairs, 100)}."
    return "\n".join([*gaps, "", told, "", *costs])


def _row(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _gap(name: str, runs: dict[str, dict[str, Run]]) -> tuple[str, ...]:
    """Returns the cells of a recipe's row."""
    loss = np.mean([run.loss for run in runs[name].values()])
    trained, held_out = (_shares(runs, name, BASE, of) for of in ("loss", "held_out"))
    above = _shares(runs, name, OURS, "loss")
    is_told = name in CONTROLS and name != AGAIN and len(above) > 1
    separates = ("yes" if _is_above(trained) and _is_above(above) else "no") if is_told else "-"
    means = _mean(trained), _mean(held_out), _mean(above)
    return name, str(len(runs[name])), f"{loss:.4f}", *means, separates


def _shares(runs: dict[str, dict[str, Run]], name: str, base: str, of: str) -> list[float]:
    """Returns by how many percent a recipe is above another, for each seed that both have."""
    if name == base:
        return []
    pairs = [(run, runs.get(base, {}).get(seed)) for seed, run in runs[name].items()]
    return [100 * (getattr(a, of) / getattr(b, of) - 1) for a, b in pairs if b is not None]


def _error(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) / len(values) ** 0.5


def _is_above(values: list[float]) -> bool:
    return len(values) > 1 and float(np.mean(values)) > 2 * _error(values)


def _mean(values: list[float]) -> str:
    """Returns the mean and, of two or more, its standard error."""
    if not values:
        return "-"
    error = f" ± {_error(values):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.3f}{error}"


def _spread(values: list[float], whole: float) -> str:
    """Returns the standard deviation, as a share of `whole`."""
    if len(values) < 2:
        return "unknown, one seed"
    return f"{100 * np.std(values, ddof=1) / whole:.3f} %"


def _read(folder: pathlib.Path) -> dict[str, dict[str, Run]]:
    """Returns the runs that ended, by recipe and seed; bf16 first."""
    found: dict[str, dict[str, Run]] = defaultdict(dict)
    for file in sorted(folder.rglob("metrics.jsonl")):
        lines = list(read(file))
        of = {kind: [line for line in lines if line["kind"] == kind] for kind in _KINDS}
        if not of["end"]:
            continue
        name, _, seed = file.parent.name.rpartition("-")
        steps, last = of["step"], of["end"][-1]["step"]
        middle = lambda key, steps=steps: float(np.median([step[key] for step in steps]))
        losses = [step["loss"] for step in steps if step["step"] > round((1 - LAST) * last)]
        found[name][seed] = Run(
            loss=float(np.mean(losses)),
            held_out=of["evaluation"][-1]["loss"],
            start=of["start"][-1],
            tokens_per_s=middle("tokens_per_s"),
            tflops=middle("tflops"),
        )
    return dict(sorted(found.items(), key=lambda item: (item[0] != BASE, item[0])))


_KINDS = ("start", "step", "evaluation", "end")
