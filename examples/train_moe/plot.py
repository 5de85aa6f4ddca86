"""Draws the losses of runs, and how far each recipe is above bf16 with the same seeds."""

import pathlib
from collections import defaultdict

import numpy as np
from metrics import read
from summary import BASE


def plot(folder: pathlib.Path, path: pathlib.Path, window: int) -> None:
    """Draws every recipe below a folder into a PNG or SVG, as means over seeds and `window` steps.

    Below is by how many percent a recipe is above bf16 with the same seed, and the standard error
    over its seeds as a band. That scale is linear below 0.1 and logarithmic beyond. Above are
    losses: the mean of bf16 over all its seeds, and the others by their gaps to it, so that seeds
    which a recipe lacks do not move it.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = _read(folder, window)
    if BASE not in runs:
        raise FileNotFoundError(f"plot: no run {BASE}-SEED with {window} steps below {folder}")
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(9, 8), layout="constrained")
    color_of = dict(zip(sorted(runs), pyplot.get_cmap("tab20").colors, strict=False))
    base_steps, base = _mean(list(runs[BASE].values()))
    base = dict(zip(base_steps, base.mean(0), strict=True))
    above.plot(base.keys(), base.values(), label=BASE, color=color_of[BASE])
    for name, seeds in sorted(runs.items()):
        pairs = [(run, runs[BASE][seed]) for seed, run in seeds.items() if seed in runs[BASE]]
        if name == BASE or not pairs:
            continue
        steps, gaps = _mean([_gap(run, of_base) for run, of_base in pairs])
        mean, error = gaps.mean(0), gaps.std(0) / max(1, len(gaps) - 1) ** 0.5
        how = dict(color=color_of[name])
        # A seed of bf16 may have fewer steps than others, if it was stopped.
        gap_at = dict(zip(steps, mean, strict=True))
        losses = {
            step: base[step] * (1 + gap / 100) for step, gap in gap_at.items() if step in base
        }
        above.plot(losses.keys(), losses.values(), label=name, **how)
        below.plot(steps, mean, **how)
        below.fill_between(steps, mean - error, mean + error, alpha=0.2, linewidth=0, **how)
    above.set(ylabel="loss, nats a byte")
    below.set(xlabel="step", ylabel="above bf16 with the same seed, %")
    below.set_yscale("symlog", linthresh=0.1)
    below.axhline(0, color="black", linewidth=0.5)
    above.legend()
    figure.savefig(path)
    pyplot.close(figure)


def _read(folder: pathlib.Path, window: int) -> dict[str, dict[str, dict[int, float]]]:
    """Returns the means over `window` steps by recipe, seed, and last step of the mean."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(dict)
    for file in sorted(folder.rglob("metrics.jsonl")):
        name, _, seed = file.parent.name.rpartition("-")
        lines = [line for line in read(file) if line["kind"] == "step"]
        if name != "fork" and len(lines) >= window:
            losses = np.array([line["loss"] for line in lines])
            means = np.convolve(losses, np.ones(window) / window, mode="valid")
            steps = [line["step"] for line in lines][window - 1 :]
            found[name][seed] = dict(zip(steps, means, strict=True))
    return found


def _gap(run: dict[int, float], base: dict[int, float]) -> dict[int, float]:
    return {step: 100 * (loss / base[step] - 1) for step, loss in run.items() if step in base}


def _mean(runs: list[dict[int, float]]) -> tuple[list[int], np.ndarray]:
    """Returns the steps that all runs have, and the values there, (runs, steps)."""
    steps = sorted(set.intersection(*map(set, runs)))
    return steps, np.array([[run[step] for step in steps] for run in runs])
