"""Draws the losses of runs, and how far each is from bf16 with the same seed."""

import pathlib

import numpy as np
from run import read


def plot(folder: pathlib.Path, path: pathlib.Path, window: int) -> None:
    """Draws every run below a folder into a PNG or SVG.

    Above are means of the loss over `window` steps. Below is each minus the run of the same seed
    whose name begins with bf16, where there is one. Runs of one recipe have one colour.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = {file.parent.name: _losses(file) for file in sorted(folder.rglob("metrics.jsonl"))}
    if not runs:
        raise FileNotFoundError(f"plot: no metrics.jsonl below {folder}")
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(9, 8), layout="constrained")
    colors: dict[str, str] = {}
    for name, losses in runs.items():
        recipe, _, seed = name.rpartition("-")
        label = recipe if recipe not in colors else None
        color = colors.setdefault(recipe, f"C{len(colors)}")
        above.plot(*_smooth(losses, window), label=label, color=color)
        base = runs.get(f"bf16-{seed}")
        if base is not None and losses is not base:
            common = min(len(losses), len(base))
            below.plot(*_smooth(losses[:common] - base[:common], window), color=color)
    above.set(ylabel="loss, nats a byte")
    below.set(xlabel="step", ylabel="loss - loss of bf16, same seed")
    below.axhline(0, color="black", linewidth=0.5)
    above.legend()
    figure.savefig(path)
    pyplot.close(figure)


def _losses(file: pathlib.Path) -> np.ndarray:
    return np.array([line["loss"] for line in read(file) if line["kind"] == "step"])


def _smooth(losses: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps, and the means of the losses of the `window` steps up to each."""
    window = max(1, min(window, len(losses)))
    means = np.convolve(losses, np.ones(window) / window, mode="valid")
    return np.arange(len(means)) + window, means
