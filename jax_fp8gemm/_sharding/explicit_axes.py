"""Explicit mesh axes: what an op does with the shardings in the types of its operands.

Over Auto axes the compiler chooses how an op runs. Over Explicit axes each array has its sharding
in its type. A primitive leaves the choice to the compiler all the same, by `with_auto_axes`. Its
results then get the shardings that `result_specs` derives, or those that the caller wants.

NOTE: no custom_vjp may run inside `with_auto_axes`. Its residuals would have a type on the Auto
mesh. JAX refuses such residuals where they leave a jit for an eager backward pass, and where vmap
moves a dimension of what a scan has kept.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_fp8gemm._sharding.entry import enter
from jax_fp8gemm._sharding.rule import (
    PartitionRule,
    Shaped,
    choose_axes,
    extents_of,
    padded,
    padded_spec,
    spec_of_axes,
)

Result = TypeVar("Result")


def result_specs(
    rule: PartitionRule, operands: Sequence[Shaped], results: Sequence[Shaped] = ()
) -> list[PartitionSpec]:
    """Returns how Explicit mesh axes cut the results, given the types of the operands.

    results: their types. They are needed where results have dimensions that no operand has.
    """
    mesh = explicit_mesh(operands)
    assert mesh is not None
    specs = [padded_spec(jax.typeof(x)) for x in operands]
    axes = choose_axes(rule, extents_of(rule, operands, results), mesh.shape, specs, [])
    uncut = axes | dict.fromkeys(rule.contracting, ())
    return [spec_of_axes(dims, uncut) for dims in rule.results]


def with_auto_axes(
    function: Callable[..., Result], operands: Sequence[object], out_specs: Callable[[], object]
) -> Result:
    """Runs function(*operands), and leaves the sharding over Explicit mesh axes to the compiler.

    out_specs() says how such axes cut the results. It is called only if there are such axes.
    NOTE: the function must make no constant arrays, as jnp.arange does, if it is to run in a scan
    whose gradient is eager. No step changes them, and nothing takes them out with Explicit types.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return function(*operands)
    axes, out_sharding = mesh.explicit_axes, jax.tree.map(partial(NamedSharding, mesh), out_specs())
    on_auto_axes = cast(
        Callable[..., Result],
        jax.sharding.auto_axes(function, axes=axes, out_sharding=out_sharding),
    )
    return on_auto_axes(*enter(operands))


def explicit_mesh(operands: object) -> AbstractMesh | None:
    """Returns the mesh with Explicit axes of the operands or of the caller, or None."""
    meshes: list[AbstractMesh] = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def reshard(x: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """Reshards `x` to `spec` over the Explicit mesh axes of its type; None keeps it as it is."""
    if spec is None:
        return x
    is_sum = spec.unreduced or spec.reduced
    if not is_sum and padded_spec(jax.typeof(x)) == padded(spec, x.ndim):
        return x
    mesh = explicit_mesh([x])
    assert mesh is not None
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def reshard_first(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Reshards the first dimensions of `x` to `spec`, and gathers the others over its axes."""
    num_first = len(spec.partitions)
    others = _without_axes_of(spec, padded_spec(jax.typeof(x))[num_first:])
    return reshard(x, PartitionSpec(*spec.partitions, *others))


def gather_over(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Gathers `x` over the axes that `spec`, of another array, names."""
    return reshard(x, PartitionSpec(*_without_axes_of(spec, padded_spec(jax.typeof(x)))))


def _without_axes_of(
    spec: PartitionSpec, entries: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...] | None]:
    used = {axis for axes in padded(spec, len(spec.partitions)) for axis in axes}
    return [tuple(axis for axis in axes if axis not in used) or None for axes in entries]


def reshape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Reshapes `x`, also where Explicit mesh axes cut it.

    The result is cut as `reshaped_spec` says, and gathered over the other axes.
    """
    mesh = jax.typeof(x).sharding.mesh
    if tuple(shape) == x.shape or not mesh.explicit_axes:
        return x.reshape(shape)
    spec = reshaped_spec(x.shape, jax.typeof(x).sharding.spec, shape, mesh.shape)
    in_shape: Callable[[jax.Array], jax.Array] = lambda x: x.reshape(shape)
    return with_auto_axes(in_shape, [x], lambda: spec)


def fold(x: jax.Array, *groups: Sequence[int]) -> jax.Array:
    """Transposes `x` to the order of `groups` and makes one dimension of each."""
    shape = [math.prod(x.shape[d] for d in group) for group in groups]
    return reshape(x.transpose([d for group in groups for d in group]), shape)


def reshaped_spec(
    shape: Sequence[int],
    spec: PartitionSpec,
    new_shape: Sequence[int],
    mesh_shape: Mapping[str, int],
) -> PartitionSpec:
    """Returns how an array of `shape`, cut as `spec`, stays cut in `new_shape` if no element moves.

    If dimensions become one, it keeps the axes of the first of them. It keeps those of the next one
    too if the first is cut into single elements. If a dimension becomes several, they get its axes
    in their order.
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
    """Yields runs of neighbouring dimensions of both shapes that have equally many elements.

    Each run is as short as possible.
    """
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


def _num_parts(axes: Sequence[str], mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)
