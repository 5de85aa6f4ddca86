"""Checks of what moe_layer is given, and its tokens with their leading dimensions folded."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.groups import as_int32
from jax_fp8gemm._sharding.explicit_axes import reshape
from jax_fp8gemm._sharding.manual_axes import replicate
from jax_fp8gemm.moe._operands import Router
from jax_fp8gemm.moe._options import OP
from jax_fp8gemm.moe._parallel.parts import NUMBERS
from jax_fp8gemm.moe._pieces import check_pieces
from jax_fp8gemm.moe._routing import Routing, as_top_k, check_bias, check_types, fit


def check_options(
    router: Any, top_k: Any, routing: Routing, bias: Any, return_load: Any, capacity_factor: Any
) -> None:
    """Raises unless the static arguments are of the right types and go together."""
    checks.check_static(OP, top_k=top_k, capacity_factor=capacity_factor)
    checks.check_bool(OP, return_load=return_load)
    check_types(OP, routing)
    given = routing.changes() | ({} if bias is None else dict(bias=bias))
    if isinstance(router, tuple | list) and given:
        got = ", ".join(f"{name} {checks.short_repr(value)}" for name, value in given.items())
        raise ValueError(
            f"{OP}: {', '.join(given)} must go with router logits; "
            f"got {got} with (indices, weights)"
        )
    if capacity_factor is None:
        return
    if not isinstance(capacity_factor, numbers.Real) or isinstance(capacity_factor, bool):
        got = checks.short_repr(capacity_factor)
        raise TypeError(f"{OP}: capacity_factor must be None or a number above 0; got {got}")
    if not capacity_factor > 0:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(
            f"{OP}: capacity_factor must be None or above 0; "
            f"got {checks.short_repr(capacity_factor)}"
        )


def check_mesh(expert_axis: Any, exchange: Any, parts: Any, mesh: Any) -> None:
    """Raises unless these arguments go together, and `parts` and `mesh` are such."""
    checks.check_static(OP, parts=parts)
    if parts is not None and checks.as_index(parts) not in NUMBERS:
        raise ValueError(f"{OP}: parts must be None, 1, 2 or 4; got {checks.short_repr(parts)}")
    if expert_axis is None and (exchange is not None or parts != 1 or mesh is not None):
        got = dict(exchange=exchange, parts=parts, mesh=mesh)
        got = ", ".join(f"{name} {checks.short_repr(value)}" for name, value in got.items())
        raise ValueError(
            f"{OP}: exchange, parts and mesh must go with expert_axis; got {got} and no "
            "expert_axis. Name the mesh axis that cuts the experts, or leave these arguments out."
        )
    if not isinstance(mesh, None | Mesh | AbstractMesh):
        raise TypeError(f"{OP}: mesh must be a jax.sharding.Mesh; got {checks.short_repr(mesh)}")


def check_layer_pieces(
    pieces: Any, expert_axis: Any, w_gate_up: Any, shared: tuple[Any, Any] | None
) -> int:
    """Returns gate_up_pieces; raises unless it fits the weights and goes with expert_axis."""
    checked = check_pieces(OP, "w_gate_up", w_gate_up, pieces)
    if shared is not None:
        check_pieces(OP, "shared_expert[0]", shared[0], pieces)
    if expert_axis is not None and checked != 1:
        raise ValueError(
            f"{OP}: gate_up_pieces must be 1 with expert_axis; got {checked}. In a shard_map over "
            "an axis of as many devices, each device has one piece, which is gate | up."
        )
    return checked


def fit_routing(
    router: Router, top_k: Any, routing: Routing, bias: Any
) -> tuple[int, Routing, jax.Array | None]:
    """Returns the arguments of a router that is folded, checked against it."""
    if isinstance(router, tuple):
        return router[0].shape[1], routing, None
    top_k = as_top_k(OP, top_k, router)
    return top_k, fit(OP, routing, top_k, router), check_bias(OP, bias, router.shape[1])


def fold_router(router: Any, x: Any, top_k: int | None) -> Router:
    """Returns the router as logits (m, num_experts), or as indices and weights (m, top_k)."""
    if not isinstance(router, tuple | list):
        if top_k is None:
            raise ValueError(
                f"{OP}: top_k must be given where router is an array of logits; got None"
            )
        router = arrays.as_array(router)
        checks.check_array(OP, "router", router)
        checks.check_dtype(OP, "router", router, formats.FLOAT_DTYPES)
        return fold("router", router, x)
    if len(router) != 2:
        raise ValueError(
            f"{OP}: router must be an array of logits, or (indices, weights); "
            f"got {type(router).__name__} of {len(router)}"
        )
    indices, weights = map(arrays.as_array, router)
    checks.check_array(OP, "indices", indices)
    checks.check_integers(OP, "indices", indices)
    # as_int32 saturates: an int64 beyond int32 would otherwise wrap, perhaps to an expert.
    indices = fold("indices", as_int32(indices, lowest=-1), x)
    checks.check_array(OP, "weights", weights)
    checks.check_dtype(OP, "weights", weights, formats.FLOAT_DTYPES)
    weights = fold("weights", weights, x)
    if weights.shape != indices.shape:
        raise ValueError(
            f"{OP}: weights must be one for each of indices {checks.short_type(indices)}; "
            f"got weights {checks.short_type(weights)}"
        )
    if indices.shape[1] == 0:
        raise ValueError(f"{OP}: indices must name at least one expert of a token; got top_k 0")
    if top_k not in (None, indices.shape[1]):
        raise ValueError(
            f"{OP}: top_k must be None or that of indices {checks.short_type(indices)}; got {top_k}"
        )
    return indices, weights


def fold(name: str, part: Any, x: Any) -> jax.Array:
    """Returns `part` (..., c), which must have the leading dimensions of x (..., d), as (m, c)."""
    part = arrays.as_array(part)
    checks.check_array(OP, name, part)
    if part.ndim != x.ndim or part.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{OP}: {name} must have the leading dimensions of x; "
            f"got {name} {checks.short_type(part)}, x {checks.short_type(x)}"
        )
    # Explicit mesh axes may cut the first dimension before and after.
    part = replicate(OP, jnp.asarray(part), from_dim=1)
    return reshape(part, (math.prod(x.shape[:-1]), part.shape[-1]))
