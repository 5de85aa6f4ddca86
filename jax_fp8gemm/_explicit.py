"""Explicit mesh axes: the sharding of the results, in an op whose own is left to the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._partition_rule import (
    PartitionRule,
    choose_axes,
    extents_of,
    padded_spec,
    spec_of_axes,
)


def result_specs(
    rule: PartitionRule, operands: Sequence[Any], results: Sequence[Any] = ()
) -> list[PartitionSpec]:
    """How the results are cut by Explicit mesh axes, given the types of the operands.

    Of the results too, where they have dimensions of their own.
    """
    mesh = _explicit_mesh(operands)
    specs = [padded_spec(jax.typeof(x)) for x in operands]
    axes = choose_axes(rule, extents_of(rule, operands, results), mesh.shape, specs, [])
    uncut = axes | dict.fromkeys(rule.contracting, ())
    return [spec_of_axes(dims, uncut) for dims in rule.results]


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
