"""Runs of all recipes and seeds within some seconds. Another call goes on where it stopped."""

import os
import pathlib
import shutil
import time
from dataclasses import replace
from typing import Any

from controls import CONTROLS
from metrics import read
from run import Options, train

from jax_fp8gemm import BF16, HYBRID, Recipe

RECIPES = {
    "bf16": BF16,
    "deepseek_v3": Recipe(),
    "hybrid": HYBRID,
    "pow2_scale": Recipe(pow2_scale=True),
    "wgrad_bf16": Recipe(wgrad="bf16"),
    "wgrad_square": Recipe(wgrad_lhs_block=(128, 128)),
    **CONTROLS,
}


BASE = "bf16"


def sweep(options: Options, recipes: dict[str, Any], seeds: list[int], seconds: float) -> bool:
    """Trains each recipe with each seed, as far as `seconds` go; returns whether all have ended.

    All recipes of a seed come before the next seed, so that a budget that ends early leaves pairs.
    A run that is at its end keeps its metrics, OUT/NAME-SEED/metrics.jsonl, and no checkpoint. No
    run begins for which less time is left than the last one took.

    With options.fork_at all recipes of a seed go on from one run of bf16, OUT/fork-SEED, which
    stops at that step. The process whose recipes have bf16 makes these runs, all before others. A
    process without bf16 waits for them.
    """
    deadline, took = time.time() + seconds, 0.0
    scratch = options.checkpoints or options.out / "checkpoints"
    options = replace(options, deadline=deadline)
    if options.fork_at and BASE in recipes and not _make_forks(options, recipes, seeds, scratch):
        return False
    for seed in seeds:
        for name, recipe in recipes.items():
            out, checkpoints = options.out / f"{name}-{seed}", scratch / f"{name}-{seed}"
            if has(out, "end", options.steps):
                continue
            begin = time.time()
            if begin + took > deadline:
                return False
            print(f"{out.name}: {max(0, deadline - time.time()):.0f} s left", flush=True)
            own = replace(options, out=out, checkpoints=checkpoints, seed=seed, recipe=recipe)
            if options.fork_at and not checkpoints.exists():
                if not _wait(options, seed):
                    return False
                shutil.copytree(scratch / f"fork-{seed}", checkpoints, copy_function=os.link)
            if not train(replace(own, keeps_end=False)):
                return False
            shutil.rmtree(checkpoints)
            took = time.time() - begin
    return True


def _make_forks(options: Options, recipes: dict[str, Any], seeds: list[int], scratch) -> bool:
    """Trains what the runs go on from; returns whether that has come to its last step."""
    for seed in seeds:
        folders = dict(out=options.out / f"fork-{seed}", checkpoints=scratch / f"fork-{seed}")
        own = replace(options, **folders, seed=seed, recipe=recipes[BASE], fork_at=None)
        if not has(folders["out"], "stop", options.fork_at):
            train(replace(own, stop_after=options.fork_at))
        if time.time() > options.deadline:
            return False
    return True


def _wait(options: Options, seed: int) -> bool:
    """Waits for the checkpoint that a seed's runs go on from; returns whether it came in time."""
    while not has(options.out / f"fork-{seed}", "stop", options.fork_at):
        if time.time() > options.deadline:
            return False
        time.sleep(0.2)
    return True


def has(out: pathlib.Path, kind: str, step: int | None) -> bool:
    """Returns whether the metrics in this folder have a line of a kind, say "end", at a step."""
    return any((x["kind"], x["step"]) == (kind, step) for x in read(out / "metrics.jsonl"))
