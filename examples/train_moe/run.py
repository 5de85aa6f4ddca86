"""A run: steps, metrics as JSON lines, checkpoints, and how it goes on from one."""

import hashlib
import pathlib
import time
from dataclasses import dataclass, replace

import jax
import numpy as np
import orbax.checkpoint as ocp
from metrics import Metrics, worst
from model import SIZES, count
from text import Text
from tqdm import tqdm
from training import Program, State, program

import jax_fp8gemm
from jax_fp8gemm import Recipe

EVALUATED = 16  # held-out batches


@dataclass(frozen=True)
class Options:
    """What a run is. A checkpoint keeps `identity`, and a run that goes on must have the same."""

    out: pathlib.Path
    recipe: Recipe
    size: str = "tiny"
    seed: int = 0
    steps: int = 200
    batch: int | None = None
    length: int | None = None
    attention: str | None = None
    light: float | None = None  # see Size
    micro_batches: int = 1
    quantizes_once: bool = True
    data: pathlib.Path | None = None
    mesh: jax.sharding.Mesh | None = None
    save_every: int = 500
    evaluate_every: int = 50
    stats_every: int = 0  # steps between statistics of what is quantised; 0: none
    checkpoints: pathlib.Path | None = None
    stop_after: int | None = None
    deadline: float = float("inf")
    keeps_end: bool = True  # a checkpoint of the last step
    fork_at: int | None = None  # the step of a checkpoint that runs of several recipes go on from

    @property
    def sizes(self):
        """The Size, with what was asked for in place of its own."""
        names = "batch", "length", "attention", "light"
        asked = {name: getattr(self, name) for name in names}
        return replace(SIZES[self.size], **{k: v for k, v in asked.items() if v is not None})

    def identity(self, text: Text) -> dict:
        """Returns what decides a run's batches, initial values and schedule."""
        sizes = self.sizes
        return dict(
            size=self.size,
            seed=self.seed,
            steps=self.steps,
            batch=sizes.batch,
            length=sizes.length,
            micro_batches=self.micro_batches,
            light=sizes.light,
            text=text.checksum,
        )


def train(options: Options) -> bool:
    """Trains to the end, to stop_after, or to the deadline; returns whether it came to the end.

    It goes on from the last checkpoint, if there is one. Lines of metrics after that step are those
    of steps that are now taken again, and are dropped.
    """
    sizes = options.sizes
    text = Text(options.data, sizes.length, sizes.batch, options.seed)
    how = options.micro_batches, options.mesh, options.quantizes_once
    code = program(sizes, options.recipe, options.steps, *how)
    total, active, flop = count(sizes, code.shapes.params)
    identity = options.identity(text)
    print(f"{options.size}: {total / 1e6:.1f} M parameters, {active / 1e6:.1f} M for each token")
    folder = (options.checkpoints or options.out / "checkpoints").absolute()
    with ocp.CheckpointManager(folder, options=_checkpoint_options()) as checkpoints:
        state, first = _begin(checkpoints, code, options.seed, identity)
        if first == options.fork_at:
            state = state._replace(params=code.move(state.params, jax.random.key(options.seed)))
        last = min(options.steps, options.stop_after or options.steps)
        with Metrics(options.out / "metrics.jsonl", first) as metrics:
            about = dict(parameters=total, active=active, flop_per_token=flop)
            about |= dict(device=jax.devices()[0].device_kind, devices=code.num_devices)
            about |= dict(text_bytes=len(text.bytes), text_checksum=text.checksum)
            about |= dict(peak_bytes=code.peak_bytes(), **_origin())  # bytes of each device
            metrics.write("start", first, recipe=repr(options.recipe), **about)
            steps = Steps(code, text, flop, metrics)
            for step in tqdm(range(first, last), initial=first, total=last, disable=None):
                if time.time() > options.deadline:
                    last = step
                    break
                state = steps.take(state, step)
                done = step + 1
                if done % options.evaluate_every == 0 or done == options.steps:
                    steps.finish()
                    metrics.write("evaluation", done, loss=_evaluate(code, state, text))
                if options.stats_every and done % options.stats_every == 0:
                    steps.finish()
                    operands = code.measure(state, code.place(text.at(step))).records()
                    metrics.write("stats", done, operands=operands)
                    tqdm.write(f"stats {done}: {worst(operands)}")
                if done % options.save_every == 0 and done < last:
                    steps.finish()
                    _save(checkpoints, done, state, identity)
            steps.finish()
            if last > first and (options.keeps_end or last < options.steps):
                _save(checkpoints, last, state, identity)
            kind = "end" if last == options.steps else "stop"
            metrics.write(kind, last, state=digest(state), **metrics.speed())
    return last == options.steps


def _origin() -> dict:
    """Returns the date, versions, and the commit where the checkout is on Python's path."""
    found = dict(date=time.strftime("%Y-%m-%d"), jax=jax.__version__)
    found |= dict(jax_fp8gemm=jax_fp8gemm.__version__)
    try:
        from benchmarks.provenance import source_commit
    except ModuleNotFoundError:
        return found
    return found | source_commit()


class Steps:
    """Takes steps. It waits for one when the next is under way, so that no device waits for it."""

    def __init__(self, code: Program, text: Text, flop: float, metrics: Metrics):
        self.code, self.text, self.flop, self.metrics = code, text, flop, metrics
        self.under_way: tuple | None = None
        self.since = time.perf_counter()

    def take(self, state: State, step: int) -> State:
        """Starts a step, and finishes the one before it."""
        batch = self.text.at(step)
        if self.under_way is None:
            self.since = time.perf_counter()
        state, found = self.code.step(state, self.code.place(batch), np.int32(step))
        self.finish()
        self.under_way = step, batch, found
        return state

    def finish(self) -> None:
        """Waits for the step that is under way, if one is, and writes its metrics.

        Seconds are those since the step before it ended. Tokens are those of all devices, TFLOPS
        those of each.
        """
        if self.under_way is None:
            return
        (step, batch, found), self.under_way = self.under_way, None
        found = {name: float(x) for name, x in found.items()}
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        tokens = batch.shape[0] * (batch.shape[1] - 1)
        of_device = self.flop * tokens / seconds / self.code.num_devices
        speed = dict(tokens_per_s=tokens / seconds, tflops=of_device / 1e12)
        # Two runs with equal checksums of a step saw the same bytes.
        seen = dict(batch=hashlib.sha256(batch.tobytes()).hexdigest()[:16])
        self.metrics.write("step", step + 1, **found, **speed, **seen, seconds=seconds)


def _evaluate(code: Program, state: State, text: Text) -> float:
    """Returns the mean loss of held-out batches."""
    batches = map(code.place, text.to_evaluate(EVALUATED))
    return float(np.mean([float(code.evaluate(state, tokens)) for tokens in batches]))


def digest(state: State) -> str:
    """Returns a hash of all bits of a state."""
    found = hashlib.sha256()
    for x in jax.tree.leaves(state):
        found.update(np.asarray(x).tobytes())
    return found.hexdigest()


def _checkpoint_options():
    return ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)


def _begin(checkpoints, code: Program, seed: int, identity: dict) -> tuple[State, int]:
    """Returns the state to go on with, and the steps that it has behind it."""
    step = checkpoints.latest_step()
    if step is None:
        return code.start(jax.random.key(seed)), 0
    parts = dict(state=ocp.args.StandardRestore(code.shapes), run=ocp.args.JsonRestore())
    found = checkpoints.restore(step, args=ocp.args.Composite(**parts))
    if found["run"] != identity:
        raise ValueError(
            f"a run that goes on must be the one of its checkpoint, {found['run']}; "
            f"got {identity}: take the same options, or another --out"
        )
    return found["state"], step


def _save(checkpoints, step: int, state: State, identity: dict) -> None:
    parts = dict(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(identity))
    checkpoints.save(step, args=ocp.args.Composite(**parts))
