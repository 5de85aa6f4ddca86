"""Explicit mesh axes: the sharding of the results, in an op whose own is left to the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._partition_rule import (
    PartitionRule,
    axes_of,
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


def check_out_sharding(op: str, out_sharding: Any, operands: Sequence[Any]) -> None:
    """Raises unless `out_sharding` can be had: None, or over the operands' Explicit mesh axes."""
    if out_sharding is None:
        return
    if not isinstance(out_sharding, NamedSharding | PartitionSpec):
        raise TypeError(
            f"{op}: out_sharding must be a PartitionSpec or a NamedSharding; got {out_sharding!r}"
        )
    context = jax.sharding.get_abstract_mesh()
    is_spec = isinstance(out_sharding, PartitionSpec)
    if is_spec and context.empty:
        raise ValueError(
            f"{op}: out_sharding must be a NamedSharding where there is no mesh of jax.set_mesh; "
            f"got {out_sharding}"
        )
    mesh = _explicit_mesh(operands)
    spec = out_sharding if is_spec else out_sharding.spec
    axes = [axis for entry in spec for axis in axes_of(entry)]
    explicit = () if mesh is None else mesh.explicit_axes
    if len(set(axes)) != len(axes) or not set(explicit).issuperset(axes):
        hint = "" if explicit else " Shard over Auto axes with jax.lax.with_sharding_constraint."
        raise ValueError(
            f"{op}: out_sharding must name Explicit axes of the operands' mesh, each once; "
            f"got {spec}, axes {explicit}.{hint}"
        )
    if mesh is not None and not is_spec and out_sharding.mesh.abstract_mesh != mesh:
        raise ValueError(
            f"{op}: out_sharding must be over the operands' mesh; got {out_sharding.mesh}, "
            f"operands on {mesh}"
        )


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
