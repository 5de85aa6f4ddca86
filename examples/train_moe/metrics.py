"""Metrics of a run: a file with one JSON object a line, and what of it is printed."""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm


def worst(operands: list[dict]) -> str:
    """Returns which operands have the largest errors and shares of zeros, of Stats.records()."""
    if not operands:
        return "nothing is quantised"
    name = lambda x: f"{x['path']} {x['operand']} ({x['pass']}, {x['blocks']})"
    most = {key: max(operands, key=lambda x, key=key: x[key]) for key in ("error", "flushed")}
    told = [f"{key} {x[key]:.2%} in {name(x)}" for key, x in most.items()]
    nonfinite = sum(x["nonfinite"] for x in operands)
    return f"{len(operands)} operands, at most " + ", ".join([*told, f"{nonfinite} nonfinite"])


class Metrics:
    """A file with one JSON object a line. Lines of steps after `step` are dropped first."""

    def __init__(self, path: pathlib.Path, step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read(path) if line["step"] <= step and line["kind"] != "stop"]
        self.speeds: list[tuple[float, float]] = []
        self.file = path.open("w")
        for line in kept:
            self.file.write(json.dumps(line) + "\n")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, kind: str, step: int, **values) -> None:
        """Writes one line, which has the kind, the number of steps taken, and the values."""
        self.file.write(json.dumps(dict(kind=kind, step=step, **values)) + "\n")
        self.file.flush()
        if kind == "step":
            self.speeds.append((values["tokens_per_s"], values["tflops"]))
        if kind in ("start", "evaluation", "end", "stop"):
            values.pop("state", None)
            tqdm.write(f"{kind} {step}: " + ", ".join(f"{k} {v}" for k, v in values.items()))

    def speed(self) -> dict[str, float]:
        """Returns the medians of the steps that this process took; nothing if it took none."""
        if not self.speeds:
            return {}
        tokens_per_s, tflops = np.median(self.speeds, axis=0)
        return dict(tokens_per_s=float(tokens_per_s), tflops=float(tflops))


def read(path: pathlib.Path) -> Iterator[dict]:
    """Yields the lines of a file of metrics; none where there is no file.

    A last line without its end was cut off with the process that wrote it, and is left out.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    yield from (json.loads(line) for line in lines if line.endswith("\n"))
