"""check_out_sharding: checks the argument out_sharding of the products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._data import checks
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh
from jax_fp8gemm._sharding.rule import axes_of


def check_out_sharding(op: str, out_sharding: Any, operands: Sequence[Any]) -> None:
    """Raises unless `out_sharding` is None, or is over Explicit mesh axes of the operands."""
    if out_sharding is None:
        return
    if not isinstance(out_sharding, NamedSharding | PartitionSpec):
        raise TypeError(
            f"{op}: out_sharding must be a PartitionSpec or a NamedSharding; "
            f"got {checks.short_repr(out_sharding)}"
        )
    context = jax.sharding.get_abstract_mesh()
    is_spec = isinstance(out_sharding, PartitionSpec)
    if is_spec and context.empty:
        raise ValueError(
            f"{op}: out_sharding must be a NamedSharding where there is no mesh of jax.set_mesh; "
            f"got {out_sharding}"
        )
    mesh = explicit_mesh(operands)
    spec = out_sharding if is_spec else out_sharding.spec
    axes = [axis for entry in spec.partitions for axis in axes_of(entry)]
    axes += [*spec.unreduced, *spec.reduced]
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
