"""Runs of all recipes and seeds within some seconds. Another call goes on where it stopped."""

import pathlib
import shutil
import time
from dataclasses import replace
from typing import Any

from controls import CONTROLS
from run import Options, read, train

from jax_fp8gemm import BF16, HYBRID, Recipe

RECIPES = {
    "bf16": BF16,
    "deepseek_v3": Recipe(),
    "hybrid": HYBRID,
    "pow2_scale": Recipe(pow2_scale=True),
    "wgrad_bf16": Recipe(wgrad="bf16"),
    **CONTROLS,
}


def sweep(options: Options, recipes: dict[str, Any], seeds: list[int], seconds: float) -> bool:
    """Trains each recipe with each seed, as far as `seconds` go; returns whether all have ended.

    All recipes of a seed come before the next seed, so that a budget that ends early leaves pairs.
    A run that is at its end keeps its metrics, OUT/NAME-SEED/metrics.jsonl, and no checkpoint. No
    run begins for which less time is left than the last one took.
    """
    deadline, took = time.time() + seconds, 0.0
    scratch = options.checkpoints or options.out / "checkpoints"
    for seed in seeds:
        for name, recipe in recipes.items():
            out, checkpoints = options.out / f"{name}-{seed}", scratch / f"{name}-{seed}"
            if is_at_end(out):
                continue
            begin = time.time()
            if begin + took > deadline:
                return False
            print(f"{out.name}: {max(0, deadline - time.time()):.0f} s left", flush=True)
            own = dict(out=out, checkpoints=checkpoints, seed=seed, recipe=recipe, keeps_end=False)
            if not train(replace(options, **own, deadline=deadline)):
                return False
            shutil.rmtree(checkpoints)
            took = time.time() - begin
    return True


def is_at_end(out: pathlib.Path) -> bool:
    """Returns whether the run in this folder took all of its steps."""
    return any(line["kind"] == "end" for line in read(out / "metrics.jsonl"))
