"""A mixture-of-experts layer on one device: moe_layer, or its parts, route to unpermute.

No expert has a capacity and no token is dropped. All is deterministic, forward and backward.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_fp8gemm import _checks
from jax_fp8gemm._moe_mlp import moe_mlp as moe_mlp
from jax_fp8gemm._permute import permute as permute
from jax_fp8gemm._permute import unpermute as unpermute
from jax_fp8gemm._primitive import replicate
from jax_fp8gemm._quantize import Implementation
from jax_fp8gemm._recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._route import Scoring
from jax_fp8gemm._route import route as route
from jax_fp8gemm._scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._weights import check_weights

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def moe_layer(
    x: Float[Array, "*batch d"],
    router: Float[Array, "*batch num_experts"]
    | tuple[Int[Array, "*batch top_k"], Float[Array, "*batch top_k"]],
    w_gate_up: Float[Array, "num_experts d two_f"] | ScaledArray,
    w_down: Float[Array, "num_experts f d"] | ScaledArray,
    *,
    top_k: int | None = None,
    scoring: Scoring = "softmax",
    normalize: bool = True,
    recipe: Recipe = DEEPSEEK_V3,
    implementation: Implementation = None,
) -> Float[Array, "*batch d"]:
    """Sends each token through top_k experts and adds up their results by weight.

    Differentiable once, in reverse mode: in x, the logits or weights, w_gate_up and w_down.

    Args:
      x: (..., d) bf16, f16 or f32: the tokens.
      router: (..., num_experts) logits, from which `route` chooses; or (indices, weights), each
        (..., top_k): a choice made elsewhere, as `permute` and `unpermute` take it.
      w_gate_up, w_down: weights of num_experts experts, as for moe_mlp.
      top_k: experts a token, needed with logits.
      scoring, normalize: as for route, with logits.
      recipe, implementation: as for moe_mlp.
    Returns:
      (..., d) array of the dtype of x.
    Raises: as the functions of this module.
    """
    op = "moe_layer"
    check_unquantised(op, "x", x)
    _checks.check_min_ndim(op, "x", x, 1, "(..., d)")
    check_weights(op, "w_gate_up", w_gate_up)
    _checks.check_ndim(op, "w_gate_up", w_gate_up, 3, "(num_experts, d, 2 f)")
    num_experts = w_gate_up.shape[0]
    if isinstance(router, tuple | list):
        if len(router) != 2:
            raise ValueError(
                f"{op}: router must be logits or (indices, weights); got {len(router)} arrays"
            )
        indices = _fold(op, "indices", router[0], x)
        weights = _fold(op, "weights", router[1], x)
        if top_k not in (None, indices.shape[1]):
            raise ValueError(
                f"{op}: top_k must be None or that of indices {_checks.short_type(indices)}; "
                f"got {top_k}"
            )
    else:
        logits = _fold(op, "router", router, x)
        if logits.shape[1] != num_experts:
            raise ValueError(
                f"{op}: router must have one logit for each of the {num_experts} experts of "
                f"w_gate_up; got router {_checks.short_type(router)}"
            )
        if top_k is None:
            raise ValueError(f"{op}: top_k must go with router logits; got None")
        indices, weights = route(logits, top_k, scoring=scoring, normalize=normalize)
    rows, group_sizes, order = permute(_fold(op, "x", x, x), indices, num_experts)
    rows = moe_mlp(
        rows, w_gate_up, w_down, group_sizes, recipe=recipe, implementation=implementation
    )
    return unpermute(rows, order, weights).reshape(x.shape)


def _fold(op: str, name: str, part: Any, x: Any) -> jax.Array:
    """`part` (..., c), with the leading dimensions of x (..., d), as (m, c)."""
    _checks.check_array(op, name, part)
    if part.ndim != x.ndim or part.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{op}: {name} must have the leading dimensions of x; "
            f"got {name} {_checks.short_type(part)}, x {_checks.short_type(x)}"
        )
    return replicate(jnp.asarray(part)).reshape(math.prod(x.shape[:-1]), part.shape[-1])
