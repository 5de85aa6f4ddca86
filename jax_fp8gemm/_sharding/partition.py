"""Partitioning: an op under jit on arrays that the compiler shards, cut at whole scale blocks.

XLA proposes a sharding of each array, `choose_axes` keeps what is legal (_sharding/rule.py), and
XLA moves the arrays to match. Each device then runs the op on its shards. If a contracting
dimension is cut, the results are partial sums, in f32 or the recipe's reduce_dtype. They are summed
over the mesh by an all-reduce, or by a reduce-scatter if the same axes cut the result.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jax_fp8gemm._runtime import jax_drift
from jax_fp8gemm._sharding.proposed import read_proposals
from jax_fp8gemm._sharding.rule import (
    Axes,
    PartitionRule,
    Shaped,
    block_of,
    choose_axes,
    choose_scattered,
    extents_of,
    spec_of_axes,
    summed_axes,
)
from jax_fp8gemm._sharding.twins import place_twins, with_twins

Arrays = Sequence[jax.Array]
Types = Sequence[jax.ShapeDtypeStruct]
Shardings = Sequence[NamedSharding]
# The mesh, what runs on each device, and the shardings of the results and of the operands.
Partition = tuple[Mesh, Callable[..., Arrays], Shardings, Shardings]

_NO_MESH = AbstractMesh((), ())
_source_lines = jax_drift.optional("jax._src.config.traceback_in_locations_limit")


@dataclass(frozen=True)
class Shards:
    """How an op is cut: what a device needs to know to run the op on its shards."""

    rule: PartitionRule
    mesh_shape: Mapping[str, int]
    axes: Axes
    scattered: Axes  # how the sum over the mesh cuts the first result

    def count(self, name: str) -> int:
        """Returns the number of shards of a dimension."""
        return math.prod(self.mesh_shape[axis] for axis in self.axes[name])

    def index(self, name: str) -> jax.Array | int:
        """Returns which shard of a dimension this device has."""
        return lax.axis_index(self.axes[name]) if self.axes[name] else 0

    @property
    def is_summed(self) -> bool:
        """Returns whether results are partial sums."""
        return bool(summed_axes(self.rule, self.axes))

    def reduce(self, x: jax.Array) -> jax.Array:
        """Adds up partial sums of the first result over the mesh."""
        dims = self.rule.results[0].split()
        rest = list(summed_axes(self.rule, self.axes))
        for name, axes in self.scattered.items():
            if axes:
                dim = dims.index(name)
                x = cast(jax.Array, lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True))
                rest = [axis for axis in rest if axis not in axes]
        return cast(jax.Array, lax.psum(x, tuple(rest))) if rest else x

    def move(self, x: jax.Array, source: str, target: int, axes: tuple[str, ...]) -> jax.Array:
        """Moves the cut of `x` from its dimension 0, cut as `source`, to its dimension `target`.

        axes: those that cut `target` then, the first ones of `source`'s. `x` is gathered over the
          others.
        """
        gathered = self.axes[source][len(axes) :]
        if gathered:
            x = cast(jax.Array, lax.all_gather(x, gathered, axis=0, tiled=True))
        if axes:
            x = lax.all_to_all(x, axes, split_axis=target, concat_axis=0, tiled=True)
        return x


def partitioned(
    run: Callable[..., Arrays],
    rule: PartitionRule,
    run_shard: Callable[..., Arrays] | None = None,
    twin_of: Sequence[int] = (),
) -> Callable[..., Arrays]:
    """Returns `run` for arrays that the compiler may shard; on one device it is `run` itself.

    Args:
      run: (*operands) -> results, on one device.
      rule: of operands and results.
      run_shard: (*operands, shards) -> results, on the Shards of a device; None: `run`.
      twin_of: the operands that have twins (twins.py). The twins follow all operands.
    """
    num_operands = len(rule.operands)
    num_read = num_operands + len(twin_of)

    def partition(mesh: Mesh, operands: Types, results: Types) -> Partition:
        operands, copies = operands[:num_read], operands[num_read:]
        if mesh.empty:  # shardings that no mesh describes
            mesh = Mesh(np.array(sorted_devices(operands[0].sharding)), ("devices",))
            operand_specs = result_specs = []
        else:
            mesh, specs = read_proposals(mesh, [*operands, *results])
            operand_specs, result_specs = specs[:num_read], specs[num_read:]
        extents = extents_of(rule, operands[:num_operands], results)
        axes = choose_axes(rule, extents, mesh.shape, operand_specs, result_specs)
        scattered = choose_scattered(rule, extents, mesh.shape, axes, result_specs)
        local = run
        if run_shard is not None and any(axes.values()):
            local = partial(run_shard, shards=Shards(rule, mesh.shape, axes, scattered))
        cut_result = {name: (*axes[name], *scattered.get(name, ())) for name in axes}
        needed = [
            NamedSharding(mesh, spec_of_axes(dims, axes if rule.contracts(dims) else cut_result))
            for dims in rule.operands
        ]
        placed = place_twins(mesh, twin_of, operand_specs, needed)
        operand_shardings = *placed.operands, *placed.twins, *needed[:1] * len(copies)
        result_shardings = [
            NamedSharding(mesh, spec_of_axes(dims, cut_result)) for dims in rule.results
        ]

        def run_on_shards(*shards: jax.Array) -> Arrays:
            # NOTE: a caller's mesh with Explicit axes would have its shardings put on the shards.
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                return _without_source_lines(local(*placed.chosen(shards)))

        return mesh, run_on_shards, result_shardings, operand_shardings

    def run_without_copies(*operands: jax.Array) -> Arrays:
        return run(*operands[:num_operands])

    function = custom_partitioning(run_without_copies)
    shardy_rule = partial(_sharding_rule, with_twins(rule, twin_of))
    # NOTE: JAX would decode the shardings, and raise for some that XLA proposes.
    function.def_partition(partition, sharding_rule=shardy_rule, decode_shardings=False)
    num_copies = sum(len(sources) for sources in rule.following.values())
    return lambda *operands: function(*operands, *operands[:1] * num_copies)


def sorted_devices(sharding: Sharding) -> list[Any]:
    """Returns the devices of `sharding`, sorted by their ids."""
    devices = cast(set[Any], sharding.device_set)  # jaxlib has no types
    return sorted(devices, key=lambda device: device.id)


def _without_source_lines(results: Arrays) -> Arrays:
    """The results of a shard, in whose program JAX writes no lines of Python.

    NOTE: XLA takes the numbers of stack frames in that program for those of the program around it.
    Where it inlines a loop, it may then follow them in a circle, for ever. JAX lowers the program
    after this call, in the same thread. So the caller's setting is back once a result is lowered.
    """
    if _source_lines is None:
        return results
    setting = _source_lines(0)
    restore = lambda: setting.__exit__(None, None, None)
    result = cast(jax.Array, _end_p.bind(results[0], restore=restore))
    setting.__enter__()
    return [result, *results[1:]]


def _end_type(result: Any, restore: Callable[[], None]) -> Any:
    del restore
    return result


def _lower_end(ctx: Any, result: Any, *, restore: Callable[[], None]) -> Any:
    del ctx
    restore()
    return [result]


# The last of a shard's program to be lowered.
_end_p = Primitive("jax_fp8gemm_end_of_shard")
_end_p.def_abstract_eval(_end_type)
mlir.register_lowering(_end_p, _lower_end)


def _sharding_rule(
    rule: PartitionRule,
    mesh: Mesh,
    operand_types: Sequence[Shaped],
    result_types: Sequence[Shaped],
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Returns the rule for Shardy. A dimension that no axis may cut has another name in each array.

    A rule has one name for a dimension. So a dimension that follows others is tied to each of them
    by one more copy of the operand, which is not read.

    NOTE: if an uncut dimension were a need_replication factor instead, Shardy would propagate its
    sharding and then undo it.
    """
    extents = extents_of(rule, operand_types[: len(rule.operands)], result_types)
    sizes = [size for size in mesh.shape.values() if size > 1]
    may_be_cut = {
        name: name not in rule.uncut
        and any(extent % (block_of(rule, name) * size) == 0 for size in sizes)
        for name, extent in extents.items()
    }
    numbers = itertools.count()

    def rename(name: str) -> str:
        return name if may_be_cut.get(name) else f"{name}_{next(numbers)}"

    def side(arrays: Sequence[str]) -> str:
        return ", ".join(" ".join(map(rename, dims.split())) for dims in arrays)

    copies = [
        " ".join(name if dim == source else "other" for dim in rule.operands[0].split())
        for name, sources in rule.following.items()
        for source in sources
    ]
    summed = tuple(name for name in rule.contracting if may_be_cut[name])
    factors = dict(reduction_factors=summed) if summed else {}
    return f"{side((*rule.operands, *copies))} -> {side(rule.results)}", factors
