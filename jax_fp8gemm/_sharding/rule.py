"""Partition rules: which dimensions of an op may be cut, and which mesh axes cut them.

An op names the dimensions of its operands and results. Dimensions of one name are cut together, so
a scale follows its values. XLA proposes a sharding of each array; `choose_axes` keeps what is
legal:

    a dimension with scale blocks is cut at multiples of 128 only, any other evenly
    a mesh axis cuts one dimension
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jax.sharding import NamedSharding, PartitionSpec

Axes = dict[str, tuple[str, ...]]  # dimension -> the mesh axes that cut it, major first
Spec = Sequence[tuple[str, ...]]  # of each dimension of an array, the mesh axes that cut it


@runtime_checkable
class Shaped(Protocol):
    """What has a shape: an array, or the type of one in JAX or MLIR."""

    @property
    def shape(self) -> Sequence[int]: ...


@runtime_checkable
class Sharded(Shaped, Protocol):
    """What also has a sharding that a mesh describes."""

    @property
    def sharding(self) -> NamedSharding: ...


@dataclass(frozen=True)
class PartitionRule:
    """Which dimensions of an op are cut together, and where.

    Attributes:
      operands, results: the names of the dimensions of each array, as in "m k". A scale has the
        names of its values.
      blocks: the scale block, in elements, of each dimension that has one.
      contracting: the dimensions that are summed over.
      uncut: the dimensions that are never cut.
      following: dimensions that only results have, each with dimensions of the first operand. The
        axes of the latter cut it, major first, and the op moves the operand accordingly.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    blocks: dict[str, int] = field(default_factory=dict[str, int])
    contracting: tuple[str, ...] = ()
    uncut: tuple[str, ...] = ()
    following: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def contracts(self, dims: str) -> bool:
        """Returns whether an array with these dimensions has a contracting one."""
        return not set(self.contracting).isdisjoint(dims.split())


def choose_axes(
    rule: PartitionRule,
    extents: Mapping[str, int],
    mesh_shape: Mapping[str, int],
    operand_specs: Sequence[Spec],
    result_specs: Sequence[Spec],
) -> Axes:
    """Returns the mesh axes that cut each dimension, out of those that the shardings name.

    A contracting dimension comes first if lhs and rhs agree on it: both then stay where they are.
    After that a product is cut as XLA wants its result, so that weights sharded over the axis of
    the rows are gathered. Any other op is cut as its operands are.
    """
    axes: Axes = dict.fromkeys(extents, ())

    def is_unused(axis: str) -> bool:
        return all(axis not in names for names in axes.values())

    def claim(name: str, wanted: tuple[str, ...]) -> None:
        if not axes[name] and name not in rule.following:
            axes[name] = _legal(rule, name, extents[name], mesh_shape, wanted, is_unused)

    operands = _proposals(rule.operands, operand_specs)
    results = _proposals(rule.results, result_specs)
    for name in rule.contracting:
        wanted = {axes for dimension, axes in operands if dimension == name}
        if len(wanted) == 1 and name in rule.operands[0].split():
            claim(name, *wanted)
    if rule.contracting:
        ordered = results + sorted(operands, key=lambda p: p[0] in rule.contracting)
    else:
        ordered = operands + results
    for name, wanted in ordered:
        claim(name, wanted)
    for name, sources in rule.following.items():
        wanted = tuple(axis for source in sources for axis in axes[source])
        axes[name] = _legal(rule, name, extents[name], mesh_shape, wanted, lambda axis: True)
    return axes


def _legal(
    rule: PartitionRule,
    name: str,
    extent: int,
    mesh_shape: Mapping[str, int],
    wanted: Iterable[str],
    is_free: Callable[[str], bool],
) -> tuple[str, ...]:
    """Returns the wanted axes before the first that is not free, or that may not cut there."""
    unit = block_of(rule, name)
    kept: list[str] = []
    for axis in wanted if name not in rule.uncut else ():
        unit *= mesh_shape[axis]
        if not is_free(axis) or extent % unit:
            break
        kept.append(axis)
    return tuple(kept)


def summed_axes(rule: PartitionRule, axes: Axes) -> tuple[str, ...]:
    """Returns the mesh axes that cut a contracting dimension."""
    return tuple(axis for name in rule.contracting for axis in axes[name])


def choose_scattered(
    rule: PartitionRule,
    extents: Mapping[str, int],
    mesh_shape: Mapping[str, int],
    axes: Axes,
    result_specs: Sequence[Spec],
) -> Axes:
    """Returns, by dimension of the result, the summed axes that a reduce-scatter cuts it by.

    The sum over any other summed axis is an all-reduce.
    """
    remaining = set(summed_axes(rule, axes))
    scattered: Axes = {}
    for name, wanted in _proposals(rule.results, result_specs):
        kept = wanted[len(axes[name]) :]
        is_legal = extents[name] % math.prod(mesh_shape[axis] for axis in wanted) == 0
        if wanted[: len(axes[name])] == axes[name] and is_legal and remaining.issuperset(kept):
            scattered[name] = kept
            remaining -= set(kept)
    return scattered


def _proposals(dims: Sequence[str], specs: Sequence[Spec]) -> list[tuple[str, tuple[str, ...]]]:
    """Returns (dimension, axes) of every dimension of every array."""
    return [
        pair
        for names, spec in zip(dims, specs, strict=False)
        for pair in zip(names.split(), spec, strict=True)
    ]


def extents_of(
    rule: PartitionRule, operands: Sequence[Shaped], results: Sequence[Shaped] = ()
) -> dict[str, int]:
    """Returns the elements of each dimension; those of the values where a scale has it too."""
    extents: dict[str, int] = {}
    for dims, x in zip((*rule.operands, *rule.results), (*operands, *results), strict=False):
        for name, extent in zip(dims.split(), x.shape, strict=True):
            extents[name] = max(extents.get(name, 0), extent)
    return extents


def block_of(rule: PartitionRule, name: str) -> int:
    """Returns the number that must divide the elements of a dimension on each device."""
    return rule.blocks.get(name, 1)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that an entry of a PartitionSpec names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def padded_spec(x: Sharded) -> list[tuple[str, ...]]:
    """Returns the mesh axes that cut each dimension of `x`."""
    return padded(x.sharding.spec, len(x.shape))


def padded(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes that `spec` gives each of `ndim` dimensions."""
    entries = [axes_of(entry) for entry in spec.partitions]
    return entries + [()] * (ndim - len(entries))


def spec_of_axes(dims: str, axes: Axes) -> PartitionSpec:
    """Returns the PartitionSpec of an array with these dimensions."""
    return PartitionSpec(*(axes[name] or None for name in dims.split()))
