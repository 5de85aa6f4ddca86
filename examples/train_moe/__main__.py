"""Trains a small mixture-of-experts transformer on bytes of real text, in bf16 or in FP8.

    python examples/train_moe train --out DIR [--recipe NAME] [--size NAME] [--seed N]
    python examples/train_moe sweep --out DIR --seconds N [--recipes NAME ...] [--seeds N ...]
    python examples/train_moe plot DIR
    python examples/train_moe summary DIR

A run whose --out has a checkpoint goes on from it, with another recipe if that is asked for.
docs/convergence.md says what the runs are for.
"""

import argparse
import math
import pathlib
import sys
from dataclasses import replace

import jax
from controls import CONTROLS, with_tokamax
from jax.sharding import AxisType
from model import SIZES
from plot import plot
from run import Options, train
from summary import summary
from sweep import RECIPES, sweep

import jax_fp8gemm


def make_mesh(text):
    """Returns the mesh of "fsdp=2,expert=4". An axis that is not named has the size 1."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        message = f"must be as in fsdp=2,expert=4; got {text}"
        raise argparse.ArgumentTypeError(message) from None
    if unknown := set(sizes) - {"fsdp", "expert"}:
        raise argparse.ArgumentTypeError(f"axes must be fsdp and expert; got {sorted(unknown)}")
    shape = tuple(sizes.get(name, 1) for name in ("fsdp", "expert"))
    if math.prod(shape) > jax.device_count():
        found = f"{jax.device_count()} devices"
        raise argparse.ArgumentTypeError(f"the mesh must have at most {found}; got {text}")
    return jax.make_mesh(shape, ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)


def light(text):
    """Returns the weight of a loss, above 0 and below 1."""
    weight = float(text)
    if not 0 < weight < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1; got {text}")
    return weight


def make_recipe(args):
    """Returns the recipe of the options."""
    recipe = RECIPES[args.recipe]
    if args.recipe == "bf16" or args.recipe in CONTROLS:
        if args.pow2_scale or args.wgrad is not None:
            name = args.recipe
            raise SystemExit(f"--recipe {name} is fixed: leave out --pow2-scale and --wgrad")
        return recipe
    wgrad = args.wgrad or recipe.wgrad
    return replace(recipe, wgrad=wgrad, pow2_scale=recipe.pow2_scale or args.pow2_scale)


def add_options(parser):
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="folder of metrics and checkpoints")
    add("--size", choices=SIZES, default="tiny")
    add("--steps", type=int, default=200, help="of the whole run")
    add("--batch", type=int, help="sequences of a step")
    add("--length", type=int, help="tokens of a sequence")
    add("--attention", choices=("xla", "cudnn"), help="cudnn is faster, for GPUs")
    add("--light", type=light, help="documents, every other of which counts so little, as 1e-6")
    add("--ragged-dot", choices=("lax", "tokamax"), default="lax", help="in bf16, by expert")
    add("--micro-batches", type=int, default=1, help="parts of a batch, one after another")
    each = "quantise weights in each part of a batch, not once a step: the same bits"
    add("--quantize-each", dest="quantizes_once", action="store_false", help=each)
    add("--data", type=pathlib.Path, help="a file or a folder; else the library's sources")
    add("--mesh", type=make_mesh, help="such as fsdp=2,expert=4")
    add("--save-every", type=int, default=500, help="steps between checkpoints")
    add("--evaluate-every", type=int, default=50, help="steps between held-out losses")
    add("--stats-every", type=int, default=0, help="steps between statistics of FP8; 0: none")
    add("--checkpoints", type=pathlib.Path, help="folder of checkpoints, if not in --out")


def parse(args):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train")
    add_options(one)
    one.add_argument("--recipe", choices=RECIPES, default="deepseek_v3")
    one.add_argument("--pow2-scale", action="store_true", help="scales are powers of two")
    one.add_argument("--wgrad", choices=("fp8", "bf16"), help="products of weight gradients")
    one.add_argument("--seed", type=int, default=0, help="of initial values and batches")
    one.add_argument("--stop-after", type=int, help="stop at this step, with a checkpoint")
    many = commands.add_parser("sweep")
    add_options(many)
    many.add_argument("--seconds", type=float, required=True, help="stop after so long")
    many.add_argument("--recipes", choices=RECIPES, nargs="+", default=list(RECIPES))
    many.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    fork = "recipes of a seed go on from one run of bf16, which stops at this step"
    many.add_argument("--fork-at", type=int, help=fork)
    draw = commands.add_parser("plot")
    draw.add_argument("folder", type=pathlib.Path)
    draw.add_argument("--to", type=pathlib.Path, help="the picture, if not FOLDER/losses.png")
    draw.add_argument("--window", type=int, default=5, help="steps of a mean")
    commands.add_parser("summary").add_argument("folder", type=pathlib.Path)
    args = parser.parse_args(args)
    if "folder" in args and not args.folder.is_dir():
        parser.error(f"DIR must be a folder that exists; got {args.folder}")
    if "micro_batches" in args:
        batch, parts = args.batch or SIZES[args.size].batch, args.micro_batches
        if parts < 1 or batch % parts:
            parser.error(f"--micro-batches must divide the batch of {batch}; got {parts}")
    return args


def main(args=None):
    """Runs a command; returns 0, or 3 where a sweep has runs left."""
    args = parse(args)
    if args.command == "plot":
        plot(args.folder, args.to or args.folder / "losses.png", args.window)
        return 0
    if args.command == "summary":
        print(summary(args.folder))
        return 0
    print(jax_fp8gemm.backend_info(), end="\n\n")
    given = {name: x for name, x in vars(args).items() if name in Options.__dataclass_fields__}
    of_options = with_tokamax if args.ragged_dot == "tokamax" else lambda recipe: recipe
    if args.command == "train":
        train(Options(**given | dict(recipe=of_options(make_recipe(args)))))
        return 0
    recipes = {name: of_options(RECIPES[name]) for name in args.recipes}
    options = Options(**given, recipe=jax_fp8gemm.BF16)
    return 0 if sweep(options, recipes, args.seeds, args.seconds) else 3


if __name__ == "__main__":
    sys.exit(main())
