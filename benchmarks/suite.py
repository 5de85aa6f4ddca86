"""`python -m benchmarks suite`: everything, in pieces that each fit a short loan of a machine.

A piece is a list of steps, the most valuable first, each a command line of `bench`. They run one
after another in a process of their own. A step that crashes it, or hangs, costs only itself. What
is done is remembered in the folder of the results, so that a piece may be run again.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import own_process
from benchmarks.suite_steps import PIECES, Step, smoke_piece

# Without one of them an hour of a GPU gives files that nobody can use.
PEER_MODULES = ("deep_gemm", "tokamax", "torch")
_CLOSING_SECONDS = 5  # to end a process, of what is left


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks suite", description=__doc__)
    add = parser.add_argument
    add("--piece", choices=[*PIECES, "smoke", "dry"], required=True)
    add("--out", default="benchmarks/results", help="folder of the results")
    add("--state", default="build/suite", help="folder of what is done, and of the logs")
    add("--seconds", type=float, default=540, help="how long the piece may take")
    add("--again", action="store_true", help="also the steps that are done")
    add("--without-peers", action="store_true", help="also where a peer's package is missing")
    add("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    steps = PIECES.get(arguments.piece) or smoke_piece(is_dry=arguments.piece == "dry")
    state = State(pathlib.Path(arguments.state))
    if arguments.in_process:
        run_steps(steps, state, arguments.out)
        return 0
    missing = [name for name in PEER_MODULES if importlib.util.find_spec(name) is None]
    if missing and arguments.piece in PIECES and not arguments.without_peers:
        print(
            f"suite: the peers' packages must be installed; missing: {', '.join(missing)}. "
            "docs/benchmarks.md says how, or give --without-peers to leave their columns empty."
        )
        return 1
    if arguments.again:
        state.forget(steps)
    return supervise(arguments, steps, state)


class State:
    """What is done, in files: `<step>.json` with its status and seconds."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def set(self, step: Step, status: str, seconds: float = 0.0) -> None:
        content = {"status": status, "seconds": round(seconds, 1)}
        self._file(step).write_text(json.dumps(content) + "\n")

    def get(self, step: Step) -> tuple[str, float]:
        """Its status ("" if it never began) and seconds."""
        if not self._file(step).is_file():
            return "", 0.0
        content = json.loads(self._file(step).read_text())
        return content["status"], content["seconds"]

    def log(self, step: Step) -> pathlib.Path:
        return self._folder / f"{step.name}.log"

    def forget(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._file(step).unlink(missing_ok=True)

    def _file(self, step: Step) -> pathlib.Path:
        return self._folder / f"{step.name}.json"


def supervise(arguments: argparse.Namespace, steps: Sequence[Step], state: State) -> int:
    """Starts the process until every step has a status or the time is over."""
    end = time.monotonic() + arguments.seconds
    options = ["--piece", arguments.piece, "--out", arguments.out, "--state", arguments.state]
    command = own_process.command("suite", "--in-process", *options)
    while any(state.get(step)[0] == "" for step in steps):
        left = end - time.monotonic() - _CLOSING_SECONDS
        if left <= 0:
            break
        environment = os.environ | {"BENCH_SUITE_END": str(time.time() + left)}
        with subprocess.Popen(command, env=environment) as process:
            try:
                process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                process.kill()
        for step in steps:
            if state.get(step)[0] == "running":
                state.set(step, "stopped", arguments.seconds)
        if process.returncode == 0:
            break
    return report(steps, state)


def report(steps: Sequence[Step], state: State) -> int:
    """Prints a line for each step. Returns how many are not done."""
    num_undone = 0
    for step in steps:
        status, seconds = state.get(step)
        num_undone += status != "done"
        print(f"{step.name:<28}{status or 'not begun':<12}{seconds:8.1f} s of {step.seconds} s")
    return min(1, num_undone)


def run_steps(steps: Sequence[Step], state: State, out: str) -> None:
    """Runs the steps that have no status yet, while there is time for them."""
    from benchmarks.commands import main as bench

    end = float(os.environ.get("BENCH_SUITE_END", "inf"))
    for step in steps:
        if state.get(step)[0]:
            continue
        if time.time() + 0.5 * step.seconds > end:
            print(f"suite: no time left for {step.name}", flush=True)
            continue
        state.set(step, "running")
        start = time.perf_counter()
        with state.log(step).open("w") as log, _redirected(log.fileno()):
            try:
                status = "failed" if bench(step.command(out)) else "done"
            except (Exception, SystemExit) as error:  # the other steps are still worth having
                print(f"{type(error).__name__}: {error}", file=log, flush=True)
                status = "failed"
        state.set(step, status, time.perf_counter() - start)
        last = state.log(step).read_text().splitlines()[-1:] or [""]
        print(f"suite: {step.name}: {status}: {last[0][:160]}", flush=True)


class _redirected:
    """Standard output and error go to a file, also those of libraries."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def __enter__(self) -> None:
        self._flush()
        self._saved = [os.dup(1), os.dup(2)]
        os.dup2(self._descriptor, 1)
        os.dup2(self._descriptor, 2)

    def __exit__(self, *exception: object) -> None:
        self._flush()
        for target, saved in enumerate(self._saved, start=1):
            os.dup2(saved, target)
            os.close(saved)

    def _flush(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
