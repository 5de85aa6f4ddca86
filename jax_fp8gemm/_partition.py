"""Partitioning: an op under jit on arrays that the compiler shards, cut at whole scale blocks.

An op names the dimensions of its operands and results; those of one name are cut together, so a
scale follows its values. XLA proposes a sharding of each array. `choose_axes` keeps what is legal:

    a dimension with scale blocks is cut at multiples of 128 only, any other evenly
    a mesh axis cuts one dimension

and XLA moves the arrays to match. Each device then runs the op on its shards. Where the
contracting dimension is cut the results are partial sums, in f32, which are summed over the mesh:
an all-reduce, or a reduce-scatter where the result shall be sharded over the same axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Arrays = Sequence[jax.Array]
Axes = dict[str, tuple[str, ...]]  # dimension -> the mesh axes that cut it, major first

_NO_MESH = AbstractMesh((), ())


@dataclass(frozen=True)
class PartitionRule:
    """Which dimensions of an op are cut together, and where.

    Attributes:
      operands, results: the dimensions of each array by name, "m k". A scale has its values' names.
      blocks: the scale block, in elements, of each dimension that has one.
      contracting: the dimension that is summed over, or None.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    blocks: dict[str, int] = field(default_factory=dict)
    contracting: str | None = None


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
            operand_specs = [_padded_spec(x) for x in operands]
            result_specs = [_padded_spec(x) for x in results]
        extents = _extents(rule, operands)
        axes = choose_axes(rule, extents, mesh.shape, operand_specs, result_specs)
        scattered = _choose_scattered(rule, extents, mesh.shape, axes, result_specs)
        summed = axes.get(rule.contracting or "", ())
        local = run
        if summed:
            assert sum_partials is not None
            reduce = partial(
                _reduce, dims=rule.results[0].split(), summed=summed, scattered=scattered
            )
            local = partial(sum_partials, reduce=reduce)
        cut_result = {name: (*axes[name], *scattered.get(name, ())) for name in axes}
        sharding = lambda dims, axes: NamedSharding(mesh, _spec(dims, axes))
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
    extents = _extents(rule, operand_types)
    sizes = [size for size in mesh.shape.values() if size > 1]
    may_be_cut = {
        name: any(extent % (_unit(rule, name) * size) == 0 for size in sizes)
        for name, extent in extents.items()
    }
    numbers = itertools.count()
    rename = lambda name: name if may_be_cut[name] else f"{name}_{next(numbers)}"
    side = lambda arrays: ", ".join(" ".join(map(rename, dims.split())) for dims in arrays)
    is_summed = rule.contracting is not None and may_be_cut[rule.contracting]
    factors = dict(reduction_factors=(rule.contracting,)) if is_summed else {}
    return f"{side(rule.operands)} -> {side(rule.results)}", factors


def choose_axes(
    rule: PartitionRule,
    extents: dict[str, int],
    mesh_shape: Any,
    operand_specs: Sequence[Sequence[tuple[str, ...]]],
    result_specs: Sequence[Sequence[tuple[str, ...]]],
) -> Axes:
    """The mesh axes that cut each dimension, out of those that the shardings name.

    A contracting dimension first where all operands agree on it: they then stay where they are.
    After that a product is cut as its result shall be, so that weights sharded over the axis of
    the rows are gathered; anything else is cut where its operand lives.
    """
    axes: Axes = dict.fromkeys(extents, ())
    operands = _proposals(rule.operands, operand_specs)
    results = _proposals(rule.results, result_specs)
    contracting = [p for p in operands if p[0] == rule.contracting]
    if len(set(contracting)) == 1:
        _claim(axes, *contracting[0], rule, extents, mesh_shape)
    others = [p for p in operands if p[0] != rule.contracting]
    ordered = operands + results if rule.contracting is None else results + others + contracting
    for name, wanted in ordered:
        _claim(axes, name, wanted, rule, extents, mesh_shape)
    return axes


def result_specs(rule: PartitionRule, *operands: Any) -> list[PartitionSpec]:
    """How the results are cut by Explicit mesh axes, given the types of the operands."""
    mesh = _explicit_mesh(operands)
    specs = [_padded_spec(jax.typeof(x)) for x in operands]
    axes = choose_axes(rule, _extents(rule, operands), mesh.shape, specs, [])
    uncut = dict(axes, **{rule.contracting: ()}) if rule.contracting else axes
    return [_spec(dims, uncut) for dims in rule.results]


def with_auto_axes(
    function: Callable[..., Any], operands: Sequence[Any], out_specs: Callable[[], Any]
) -> Any:
    """function(*operands) with the sharding over Explicit mesh axes left to the compiler.

    out_specs() says how such axes cut the results, and is asked only where there are any.
    """
    mesh = _explicit_mesh(operands)
    if mesh is None:
        return function(*operands)
    axes, out_sharding = mesh.explicit_axes, jax.tree.map(partial(NamedSharding, mesh), out_specs())
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out_sharding)(*operands)


def _explicit_mesh(operands: Sequence[Any]) -> Any:
    """The mesh with Explicit axes that operands or the caller are on, if there is one."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _claim(axes: Axes, name: str, wanted, rule: PartitionRule, extents, mesh_shape) -> None:
    """Cuts an uncut dimension by the wanted axes, up to the first that is in use or illegal."""
    if axes[name]:
        return
    used = {axis for names in axes.values() for axis in names}
    unit = _unit(rule, name)
    kept = []
    for axis in wanted:
        unit *= mesh_shape[axis]
        if axis in used or extents[name] % unit:
            break
        kept.append(axis)
    axes[name] = tuple(kept)


def _choose_scattered(rule: PartitionRule, extents, mesh_shape, axes: Axes, result_specs) -> Axes:
    """Which of the axes summed over shall cut which dimension of the result instead."""
    remaining = set(axes.get(rule.contracting or "", ()))
    scattered: Axes = {}
    for name, wanted in _proposals(rule.results, result_specs):
        kept = wanted[len(axes[name]) :]
        is_legal = extents[name] % math.prod(mesh_shape[axis] for axis in wanted) == 0
        if wanted[: len(axes[name])] == axes[name] and is_legal and remaining.issuperset(kept):
            scattered[name] = kept
            remaining -= set(kept)
    return scattered


def _reduce(x: jax.Array, *, dims: list[str], summed, scattered: Axes) -> jax.Array:
    for name, axes in scattered.items():
        if axes:
            dim = dims.index(name)
            x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    rest = tuple(a for a in summed if not any(a in axes for axes in scattered.values()))
    return jax.lax.psum(x, rest) if rest else x


def _proposals(dims: Sequence[str], specs) -> list[tuple[str, tuple[str, ...]]]:
    """(dimension, axes) of every dimension of every array."""
    return [
        pair
        for names, spec in zip(dims, specs, strict=False)
        for pair in zip(names.split(), spec, strict=True)
    ]


def _padded_spec(x: Any) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    as_tuple = lambda axes: () if axes is None else (axes,) if isinstance(axes, str) else axes
    spec = [as_tuple(axes) for axes in x.sharding.spec]
    return spec + [()] * (len(x.shape) - len(spec))


def _extents(rule: PartitionRule, operands: Sequence[Any]) -> dict[str, int]:
    """Elements of each dimension: of the values, where a scale has the dimension too."""
    extents: dict[str, int] = {}
    for dims, x in zip(rule.operands, operands, strict=True):
        for name, extent in zip(dims.split(), x.shape, strict=True):
            extents[name] = max(extents.get(name, 0), extent)
    return extents


def _unit(rule: PartitionRule, name: str) -> int:
    """What the elements on each device must be a multiple of."""
    return rule.blocks.get(name, 1)


def _spec(dims: str, axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(axes[name] or None for name in dims.split()))
