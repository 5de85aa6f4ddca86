"""einsum_of_weight: an einsum whose second operand is a QuantizedWeight, by dot_general."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from opt_einsum.parser import parse_einsum_input

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._ops.dot_general import dot_general
from jax_fp8gemm._ops.product_spec import ProductSpec
from jax_fp8gemm._ops.weights import check_folded


def einsum_of_weight(
    op: str,
    spec: ProductSpec,
    subscripts: str,
    lhs: jax.Array,
    rhs: QuantizedWeight,
    out_sharding: Any,
) -> jax.Array:
    """Returns the einsum in FP8, whose rhs is the weight whatever the order of the result."""
    inputs, out, _ = parse_einsum_input((subscripts, lhs.shape, rhs.shape), shapes=True)
    lhs_names, rhs_names = inputs.split(",")
    has_all = set(rhs_names) <= set(lhs_names + out) and set(lhs_names) <= set(rhs_names + out)
    if not has_all or any(len(set(names)) != len(names) for names in (lhs_names, rhs_names)):
        raise NotImplementedError(
            f"{op}: with a QuantizedWeight, each letter must name one dimension of an operand, and "
            f"one of the other operand or of the result; got {checks.short_repr(subscripts)}. Pass "
            "its weight."
        )
    # In the order of the quantisation. A product may contract its free dimensions: see as_matrices.
    dims = [d for d in range(-rhs.ndim, 0) if rhs_names[d] not in out]
    order = next((known for known in (rhs.contracting, rhs.free) if set(known) == set(dims)), dims)
    contracted = [rhs_names[d] for d in order]
    batch = [name for name in rhs_names if name in lhs_names and name in out]
    dims_of = lambda names: tuple(tuple(map(side.index, names)) for side in (lhs_names, rhs_names))
    made = [*batch, *(n for n in lhs_names + rhs_names if n in out and n not in batch)]
    back = [made.index(name) for name in out]
    contract_dims, batch_dims = dims_of(contracted), dims_of(batch)
    check_folded(op, "rhs", rhs, contract_dims[1], batch_dims[1])
    result = dot_general(
        lhs,
        rhs,
        (contract_dims, batch_dims),
        preferred_element_type=spec.out_dtype,
        recipe=spec.recipe,
        implementation=spec.implementation,
        out_sharding=_transposed(op, out_sharding, [out.index(name) for name in made]),
    )
    return jnp.transpose(result, back)


def _transposed(op: str, sharding: Any, order: list[int]) -> Any:
    """Returns a sharding of the result, or None, with its dimensions in this order."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if len(spec.partitions) > len(order):
        raise ValueError(
            f"{op}: out_sharding must have at most one entry for each dimension of the result; "
            f"got {spec} for {len(order)} dimensions"
        )
    entries = [*spec.partitions, *(None,) * (len(order) - len(spec.partitions))]
    sums = dict(unreduced=spec.unreduced, reduced=spec.reduced)
    turned = PartitionSpec(*(entries[d] for d in order), **sums)
    return sharding.update(spec=turned) if isinstance(sharding, NamedSharding) else turned
