"""What Explicit and manual mesh axes ask of the operands of an op."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec


def replicate(x: jax.Array, from_dim: int = 0) -> jax.Array:
    """`x` with no dimension from this one on sharded over an Explicit mesh axis."""
    aval = jax.typeof(x)
    spec = aval.sharding.spec
    if all(axes is None for axes in spec[from_dim:]):
        return x
    kept = (*spec[:from_dim], *(None,) * (aval.ndim - from_dim))
    return jax.sharding.reshard(x, aval.sharding.update(spec=PartitionSpec(*kept)))


def match_varying(*operands: Any) -> tuple[Any, ...]:
    """Gives the arrays of all operands, pytrees, the union of their varying manual axes.

    For shard_map with check_vma. Done before a custom_vjp, JAX then sums the cotangent of an
    operand that did not vary.
    """
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    union = frozenset().union(*map(varying, jax.tree.leaves(operands)))

    def cast(x):
        missing = union - varying(x)
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, operands)


def constant_like(x: jax.Array, constant: jax.Array) -> jax.Array:
    """`constant`, varying over the manual axes that `x` varies over: the start of a scan."""
    return match_varying(constant, x)[0]
