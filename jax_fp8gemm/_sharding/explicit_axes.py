"""Explicit mesh axes: what an op makes of the shardings in the types of its operands.

The compiler chooses how an op runs on a mesh whose axes are Auto. Over Explicit axes each array has
its sharding in its type. So a primitive leaves the choice to the compiler by `with_auto_axes`, and
its results get the shardings that `result_specs` tells or that the caller asks for.

NOTE: no custom_vjp may run inside `with_auto_axes`. What it keeps for its backward pass would have
a type on the Auto mesh. JAX refuses such residuals where they leave a jit for an eager backward
pass, and where vmap moves a dimension of what a scan has kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._sharding.rule import (
    PartitionRule,
    choose_axes,
    extents_of,
    padded,
    padded_spec,
    spec_of_axes,
)


def result_specs(
    rule: PartitionRule, operands: Sequence[Any], results: Sequence[Any] = ()
) -> list[PartitionSpec]:
    """How the results are cut by Explicit mesh axes, given the types of the operands.

    Of the results too, where they have dimensions of their own.
    """
    mesh = explicit_mesh(operands)
    specs = [padded_spec(jax.typeof(x)) for x in operands]
    axes = choose_axes(rule, extents_of(rule, operands, results), mesh.shape, specs, [])
    uncut = axes | dict.fromkeys(rule.contracting, ())
    return [spec_of_axes(dims, uncut) for dims in rule.results]


def with_auto_axes(
    function: Callable[..., Any], operands: Sequence[Any], out_specs: Callable[[], Any]
) -> Any:
    """function(*operands) with the sharding over Explicit mesh axes left to the compiler.

    out_specs() says how such axes cut the results. It is called only where there are any.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return function(*operands)
    axes, out_sharding = mesh.explicit_axes, jax.tree.map(partial(NamedSharding, mesh), out_specs())
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out_sharding)(*operands)


def explicit_mesh(operands: Sequence[Any]) -> Any:
    """The mesh with Explicit axes that operands or the caller are on, if there is one."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def reshard(x: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """`x`, cut as `spec` says over the Explicit mesh axes of its type; None: as it is."""
    if spec is None:
        return x
    is_sum = spec.unreduced or spec.reduced
    if not is_sum and padded_spec(jax.typeof(x)) == padded(spec, x.ndim):
        return x
    return jax.sharding.reshard(x, NamedSharding(explicit_mesh([x]), spec))


def reshape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` in another shape, also where Explicit mesh axes cut it.

    The result is cut as `reshaped_spec` says. It is gathered over the other axes.
    """
    mesh = jax.typeof(x).sharding.mesh
    if tuple(shape) == x.shape or not mesh.explicit_axes:
        return x.reshape(shape)
    spec = reshaped_spec(x.shape, jax.typeof(x).sharding.spec, shape, mesh.shape)
    return with_auto_axes(lambda x: x.reshape(shape), [x], lambda: spec)


def reshaped_spec(
    shape: Sequence[int], spec: PartitionSpec, new_shape: Sequence[int], mesh_shape: Any
) -> PartitionSpec:
    """How an array of `shape`, cut as `spec`, stays cut in `new_shape` where no element moves.

    Dimensions that become one keep the axes of the first, and of the next where the first is cut
    into single elements. A dimension that becomes several hands its axes to them in that order.
    """
    entries = padded(spec, len(shape))
    new_entries: list[tuple[str, ...]] = [()] * len(new_shape)
    if 0 in shape:
        return PartitionSpec(*(None,) * len(new_shape))
    for old, new in _matching_dims(shape, new_shape):
        merged: list[str] = []
        for dim in old:
            merged += entries[dim]
            if shape[dim] != _num_parts(entries[dim], mesh_shape):
                break
        for dim in new:
            kept = 0
            while kept < len(merged) and not (
                new_shape[dim] % _num_parts(merged[: kept + 1], mesh_shape)
            ):
                kept += 1
            new_entries[dim], merged = tuple(merged[:kept]), merged[kept:]
            if new_shape[dim] != _num_parts(new_entries[dim], mesh_shape):
                break
    return PartitionSpec(*(entry or None for entry in new_entries))


def _matching_dims(shape: Sequence[int], new_shape: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Neighbouring dimensions of both shapes with as many elements, as few as possible."""
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        first, new_first, size, new_size = i, j, 1, 1
        if i < len(shape):
            size, i = shape[i], i + 1
        if j < len(new_shape):
            new_size, j = new_shape[j], j + 1
        while size != new_size:
            if size < new_size:
                size, i = size * shape[i], i + 1
            else:
                new_size, j = new_size * new_shape[j], j + 1
        yield range(first, i), range(new_first, j)


def _num_parts(axes: Sequence[str], mesh_shape: Any) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)
