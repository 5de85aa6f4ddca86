"""What Explicit and manual mesh axes ask of the operands of an op."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec


def settle(op: str, x: jax.Array) -> jax.Array:
    """`x` with a type that is neither reduced nor unreduced over Explicit mesh axes.

    A reduced array is replicated, and its cotangent is unreduced: each device holds a part of a
    sum. NOTE: `with_auto_axes` must not see such a type. For JAX a complete sum on the Auto mesh is
    then the part of each device, and the cotangent comes out times the number of devices.
    """
    sharding = jax.typeof(x).sharding
    spec = sharding.spec
    if spec.unreduced:
        raise ValueError(
            f"{op}: operands must not be unreduced over mesh axes; got {jax.typeof(x)}, {spec}. "
            "Add up what the devices hold first: jax.sharding.reshard(x, PartitionSpec())."
        )
    if not spec.reduced:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*spec.partitions)))


def replicate(op: str, x: jax.Array, from_dim: int = 0) -> jax.Array:
    """`x`, settled, with no dimension from this one on sharded over an Explicit mesh axis."""
    x = settle(op, x)
    sharding = jax.typeof(x).sharding
    spec = sharding.spec
    if all(axes is None for axes in spec[from_dim:]):
        return x
    kept = (*spec[:from_dim], *(None,) * (x.ndim - from_dim))
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*kept)))


def match_varying(*operands: Any) -> tuple[Any, ...]:
    """Gives the arrays of all operands, pytrees, the union of their varying manual axes.

    For shard_map with check_vma. Done before a custom_vjp, JAX then sums the cotangent of an
    operand that did not vary.
    """
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    union = frozenset().union(*map(varying, jax.tree.leaves(operands)))

    def cast(x):
        reduced = union & jax.typeof(x).manual_axis_type.reduced
        # One cast for each kind of type: of a reduced operand the cotangent is not summed.
        for axes in (reduced, union - varying(x) - reduced):
            x = jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
        return x

    return jax.tree.map(cast, operands)


def constant_like(x: jax.Array, constant: jax.Array) -> jax.Array:
    """`constant`, varying over the manual axes that `x` varies over: the start of a scan."""
    return match_varying(constant, x)[0]
