"""Partition rules: which dimensions of an op may be cut, and which mesh axes cut them.

An op names the dimensions of its operands and results; those of one name are cut together, so a
scale follows its values. XLA proposes a sharding of each array. `choose_axes` keeps what is legal:

    a dimension with scale blocks is cut at multiples of 128 only, any other evenly
    a mesh axis cuts one dimension
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

Axes = dict[str, tuple[str, ...]]  # dimension -> the mesh axes that cut it, major first


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


def _claim(axes: Axes, name: str, wanted, rule: PartitionRule, extents, mesh_shape) -> None:
    """Cuts an uncut dimension by the wanted axes, up to the first that is in use or illegal."""
    if axes[name]:
        return
    used = {axis for names in axes.values() for axis in names}
    unit = block_of(rule, name)
    kept = []
    for axis in wanted:
        unit *= mesh_shape[axis]
        if axis in used or extents[name] % unit:
            break
        kept.append(axis)
    axes[name] = tuple(kept)


def choose_scattered(rule: PartitionRule, extents, mesh_shape, axes: Axes, result_specs) -> Axes:
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


def _proposals(dims: Sequence[str], specs) -> list[tuple[str, tuple[str, ...]]]:
    """(dimension, axes) of every dimension of every array."""
    return [
        pair
        for names, spec in zip(dims, specs, strict=False)
        for pair in zip(names.split(), spec, strict=True)
    ]


def extents_of(rule: PartitionRule, operands: Sequence[Any]) -> dict[str, int]:
    """Elements of each dimension: of the values, where a scale has the dimension too."""
    extents: dict[str, int] = {}
    for dims, x in zip(rule.operands, operands, strict=True):
        for name, extent in zip(dims.split(), x.shape, strict=True):
            extents[name] = max(extents.get(name, 0), extent)
    return extents


def block_of(rule: PartitionRule, name: str) -> int:
    """What the elements on each device must be a multiple of."""
    return rule.blocks.get(name, 1)


def padded_spec(x: Any) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    as_tuple = lambda axes: () if axes is None else (axes,) if isinstance(axes, str) else axes
    spec = [as_tuple(axes) for axes in x.sharding.spec]
    return spec + [()] * (len(x.shape) - len(spec))


def spec_of_axes(dims: str, axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(axes[name] or None for name in dims.split()))
