"""Case: one row to measure, and what cases of several families share."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from benchmarks.problem import Shape, Work
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call
from jax_fp8gemm._tuning import tile_config
from jax_fp8gemm._tuning.tile import TileConfig

Build = Callable[[], Call]
GEMM_KERNEL = "fp8_gemm"  # substring of the names of our GEMM kernels


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to measure. `build` makes our call; `peers` makes the others', by name.

    tiles: the configs that `--tile all` runs: the heuristic's, and those with clusters.
    """

    labels: Mapping[str, Any]
    shape: Shape
    work: Work
    config: str
    build: Build
    peers: Mapping[str, Build]
    tiles: Sequence[TileConfig] = (*tile_config.CONFIGS, *tile_config.CLUSTER_CONFIGS)


def gemm_call(
    multiply: Callable[..., jax.Array],
    operands: Sequence[Any],
    total: jax.Array | None = None,
    compiler_options: dict[str, str | bool] | None = None,
) -> Call:
    """The jitted product of `operands`; with `total`, accumulated into it in place."""
    jit = functools.partial(jax.jit, compiler_options=compiler_options)
    if total is None:
        # A function of its own: jit would take what it compiled for `multiply` with another tile.
        plain = jit(lambda *operands: multiply(*operands))
        return Call(lambda: plain(*operands), jax_queue(), GEMM_KERNEL)
    add = jit(lambda c, *operands: multiply(*operands, accumulate_into=c), donate_argnums=0)
    totals = [total]

    def run() -> jax.Array:
        totals[0] = add(totals[0], *operands)
        return totals[0]

    return Call(run, jax_queue(), GEMM_KERNEL)


def peak_bytes(program: jax.stages.Compiled) -> int | None:
    """Device memory of a compiled program's arguments, results and temporaries, if XLA says."""
    memory = program.memory_analysis()
    if memory is None:
        return None
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return total + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def tile_text(c: TileConfig) -> str:
    """The tile config in short; docs/benchmarks.md says how to read it."""
    cluster = f"{c.cluster_m}x{c.cluster_n}" + (f"x{c.cluster_k}" if c.cluster_k > 1 else "")
    return (
        f"{c.block_m}x{c.block_n}/{c.sub_n} w{c.num_consumers} a{c.num_accums} s{c.num_stages} "
        f"d{c.num_slabs} c{cluster}"
    )
