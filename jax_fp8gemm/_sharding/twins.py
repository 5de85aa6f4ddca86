"""Twins: operands that an op is given transposed too, and which of the two a device reads.

A weight that is quantised for two products is stored both ways. Where a mesh gathers it, each
product would gather its own orientation: twice the bytes. So an op takes the other orientation of
an operand too, its twin, as one more operand behind the others. Where a device lacks a part of the
operand, the twin is moved in its place and transposed on the device. Elsewhere nothing reads the
twin. Both products then gather the same array, and XLA gathers it once for all that need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fp8gemm._sharding.rule import PartitionRule, Spec, padded

_Dim = TypeVar("_Dim")  # the name of a dimension, or the mesh axes that cut it


def with_twins(rule: PartitionRule, twin_of: Sequence[int]) -> PartitionRule:
    """Returns `rule` with the twins of these operands behind its operands."""
    twins = (" ".join(_swapped(rule.operands[i].split())) for i in twin_of)
    return replace(rule, operands=(*rule.operands, *twins))


@dataclass(frozen=True)
class PlacedTwins:
    """How operands and their twins are cut.

    Attributes:
      operands, twins: the shardings.
      read: for each twin that a device reads, the operand in whose place it does.
    """

    operands: tuple[NamedSharding, ...]
    twins: tuple[NamedSharding, ...]
    read: dict[int, int]

    def chosen(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the operands of a device, of its operands and the twins behind them."""
        num_operands = len(self.operands)
        chosen = list(arrays[:num_operands])
        for twin, operand in self.read.items():
            chosen[operand] = arrays[num_operands + twin].mT
        return chosen


def place_twins(
    mesh: Mesh, twin_of: Sequence[int], given: Sequence[Spec], needed: Sequence[NamedSharding]
) -> PlacedTwins:
    """Returns how operands and twins are cut, so that of each pair only what is read is moved.

    given: how the operands are cut, and behind them the twins; empty if no mesh describes it.
    needed: how the op reads its operands.
    """
    operands, twins, read = list(needed), list[NamedSharding](), dict[int, int]()

    def sharding(spec: Spec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))

    for i, operand in enumerate(twin_of):
        wanted = padded(needed[operand].spec, len(needed[operand].spec))
        if not given:
            twins.append(sharding(_swapped(wanted)))
        elif _has_its_part(given[operand], wanted):
            twins.append(sharding(given[len(needed) + i]))
        else:
            operands[operand] = sharding(given[operand])
            twins.append(sharding(_swapped(wanted)))
            read[i] = operand
    return PlacedTwins(tuple(operands), tuple(twins), read)


def _has_its_part(given: Spec, wanted: Spec) -> bool:
    """Returns whether each device has what it needs of an array, and perhaps more."""
    return all(after[: len(before)] == before for before, after in zip(given, wanted, strict=True))


def _swapped(dims: Sequence[_Dim]) -> list[_Dim]:
    *batch, rows, columns = dims
    return [*batch, columns, rows]
