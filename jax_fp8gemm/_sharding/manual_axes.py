"""Gives operands of an op the types that Explicit and manual mesh axes require."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVarTuple, cast

import jax
from jax.sharding import PartitionSpec

Operands = TypeVarTuple("Operands")


def check_reduced(op: str, operands: Any) -> None:
    """Raises ValueError if an array of `operands`, a pytree, is unreduced over mesh axes."""
    for x in jax.tree.leaves(operands):
        spec = jax.typeof(x).sharding.spec
        if spec.unreduced:
            raise ValueError(
                f"{op}: operands must not be unreduced over mesh axes; got {jax.typeof(x)}, "
                f"{spec}. Add up what the devices hold first: "
                "jax.sharding.reshard(x, PartitionSpec())."
            )


def settle(op: str, x: jax.Array) -> jax.Array:
    """Returns `x` with a type that is neither reduced nor unreduced over Explicit mesh axes.

    A reduced array is replicated, and its cotangent is unreduced: each device holds a part of a
    sum. NOTE: `with_auto_axes` must not see such a type. JAX would take a complete sum on the Auto
    mesh for the part of each device, and multiply the cotangent by the number of devices.
    """
    check_reduced(op, x)
    sharding = jax.typeof(x).sharding
    spec = sharding.spec
    if not spec.reduced:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*spec.partitions)))


def replicate(op: str, x: jax.Array, from_dim: int = 0) -> jax.Array:
    """Settles `x` and gathers its dimensions from this one on over Explicit mesh axes."""
    x = settle(op, x)
    sharding = jax.typeof(x).sharding
    spec = sharding.spec
    if all(axes is None for axes in spec[from_dim:]):
        return x
    kept = (*spec[:from_dim], *(None,) * (x.ndim - from_dim))
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*kept)))


def axes_of_batch(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Any:
    """Returns what cuts the dimensions that jax.vmap maps: an entry of a PartitionSpec."""
    specs = (jax.typeof(x).sharding.spec for x in operands)
    mapped = (spec[dim] for spec, dim in zip(specs, dims, strict=True) if dim is not None)
    return next((axes for axes in mapped if axes is not None), None)


def cut_batch(axes: Any, x: jax.Array, dim: int | None) -> jax.Array:
    """Cuts dimension `dim` of `x`, which jax.vmap maps, by `axes`, from axes_of_batch."""
    if axes is None or dim is None:
        return x
    sharding = jax.typeof(x).sharding
    entries = list(sharding.spec.partitions)
    entries[dim] = axes
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*entries)))


def match_varying(*operands: *Operands) -> tuple[*Operands]:
    """Gives the arrays of all operands, pytrees, the union of their varying manual axes.

    shard_map with check_vma needs it. If it is done before a custom_vjp, JAX sums the cotangent of
    an operand that did not vary.
    """
    union = frozenset[str]().union(*map(_varying, jax.tree.leaves(operands)))

    def vary(x: jax.Array) -> jax.Array:
        reduced: frozenset[str] = union & jax.typeof(x).manual_axis_type.reduced
        # One cast for each kind of type: the cotangent of a reduced operand is not summed.
        for axes in (reduced, union - _varying(x) - reduced):
            if axes:
                x = cast(jax.Array, jax.lax.pcast(x, tuple(sorted(axes)), to="varying"))
        return x

    return jax.tree.map(vary, operands)


def constant_like(x: jax.Array, constant: jax.Array) -> jax.Array:
    """Makes `constant` vary over the manual axes that `x` varies over, as a scan's start must."""
    return match_varying(constant, x)[0]


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
