"""Partitioning: an op under jit on arrays that the compiler shards, cut at whole scale blocks.

XLA proposes a sharding of each array, `choose_axes` keeps what is legal (_partition_rule.py), and
XLA moves the arrays to match. Each device then runs the op on its shards. Where the contracting
dimension is cut the results are partial sums, in f32, which are summed over the mesh: an
all-reduce, or a reduce-scatter where the result shall be sharded over the same axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jax_fp8gemm._partition_rule import (
    Axes,
    PartitionRule,
    block_of,
    choose_axes,
    choose_scattered,
    extents_of,
    padded_spec,
    spec_of_axes,
)

Arrays = Sequence[jax.Array]

_NO_MESH = AbstractMesh((), ())


def partitioned(
    run: Callable[..., Arrays],
    rule: PartitionRule,
    sum_partials: Callable[..., Arrays] | None = None,
) -> Callable[..., Arrays]:
    """`run` on arrays that the compiler may shard; on one device it is `run` itself.

    Args:
      run: (*operands) -> results, on one device.
      rule: of operands and results.
      sum_partials: (*operands, reduce) -> results where the contracting dimension is cut;
        reduce(x) sums the f32 partial sums x of one result over the mesh.
    """

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        if mesh.empty:  # shardings that no mesh describes
            devices = sorted(operands[0].sharding.device_set, key=lambda device: device.id)
            mesh = Mesh(np.array(devices), ("devices",))
            operand_specs = result_specs = []
        else:
            operand_specs = [padded_spec(x) for x in operands]
            result_specs = [padded_spec(x) for x in results]
        extents = extents_of(rule, operands)
        axes = choose_axes(rule, extents, mesh.shape, operand_specs, result_specs)
        scattered = choose_scattered(rule, extents, mesh.shape, axes, result_specs)
        summed = axes.get(rule.contracting or "", ())
        local = run
        if summed:
            assert sum_partials is not None
            reduce = partial(
                _reduce, dims=rule.results[0].split(), summed=summed, scattered=scattered
            )
            local = partial(sum_partials, reduce=reduce)
        cut_result = {name: (*axes[name], *scattered.get(name, ())) for name in axes}
        sharding = lambda dims, axes: NamedSharding(mesh, spec_of_axes(dims, axes))
        operand_shardings = tuple(
            sharding(dims, axes if rule.contracting in dims.split() else cut_result)
            for dims in rule.operands
        )
        result_shardings = [sharding(dims, cut_result) for dims in rule.results]

        def run_on_shards(*shards):
            # NOTE: a caller's mesh with Explicit axes would have its shardings put on the shards.
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                return local(*shards)

        return mesh, run_on_shards, result_shardings, operand_shardings

    function = custom_partitioning(lambda *operands: run(*operands))
    function.def_partition(partition, sharding_rule=partial(_sharding_rule, rule))
    return function


def _sharding_rule(rule: PartitionRule, mesh: Mesh, operand_types: Any, result_types: Any) -> Any:
    """The rule for Shardy, in which a dimension that no axis may cut has a name for each array.

    NOTE: as a need_replication factor its sharding would still be propagated, and then undone.
    """
    extents = extents_of(rule, operand_types)
    sizes = [size for size in mesh.shape.values() if size > 1]
    may_be_cut = {
        name: any(extent % (block_of(rule, name) * size) == 0 for size in sizes)
        for name, extent in extents.items()
    }
    numbers = itertools.count()
    rename = lambda name: name if may_be_cut[name] else f"{name}_{next(numbers)}"
    side = lambda arrays: ", ".join(" ".join(map(rename, dims.split())) for dims in arrays)
    is_summed = rule.contracting is not None and may_be_cut[rule.contracting]
    factors = dict(reduction_factors=(rule.contracting,)) if is_summed else {}
    return f"{side(rule.operands)} -> {side(rule.results)}", factors


def _reduce(x: jax.Array, *, dims: list[str], summed, scattered: Axes) -> jax.Array:
    for name, axes in scattered.items():
        if axes:
            dim = dims.index(name)
            x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    rest = tuple(a for a in summed if not any(a in axes for axes in scattered.values()))
    return jax.lax.psum(x, rest) if rest else x
