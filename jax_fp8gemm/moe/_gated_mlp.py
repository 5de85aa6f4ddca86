"""gated_mlp: one gated MLP for every token, as a moe_mlp of one expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.weights import check_weights
from jax_fp8gemm.moe._mlp import moe_mlp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def gated_mlp(
    x: Float[Array, "*batch d"],
    w_gate_up: Float[Array, "d two_f"] | QuantizedWeight | ScaledArray,
    w_down: Float[Array, "f d"] | QuantizedWeight | ScaledArray,
    *,
    activation: Activation = "silu",
    gate_up_pieces: int = 1,
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
) -> Float[Array, "*batch d"]:
    """Applies one gated MLP to every token: (act(x . gate) * (x . up)) . down.

    It is moe_mlp with one group. So the activation is quantised as it is computed.

    Args:
      x: (..., d) bf16, f16 or f32.
      w_gate_up: (d, 2 f), gate | up, and w_down: (f, d), like x or quantised, as for moe_mlp.
      activation, gate_up_pieces, recipe, implementation: as for moe_mlp.
    Returns:
      (..., d) array of the dtype of x.
    Raises:
      TypeError: a dtype, or no array. ValueError: shapes that do not fit. Others as moe_mlp.
    """
    op = "gated_mlp"
    x, w_gate_up, w_down = map(arrays.as_array, (x, w_gate_up, w_down))
    check_unquantised(op, "x", x)
    checks.check_min_ndim(op, "x", x, 1, "(..., d)")
    check_gated_mlp(op, x, {"w_gate_up": w_gate_up, "w_down": w_down})
    x = jnp.asarray(x)
    rows = x.reshape(-1, x.shape[-1])
    w_gate_up, w_down = jax.tree.map(lambda w: jnp.expand_dims(w, 0), (w_gate_up, w_down))
    sizes = jnp.full((1,), rows.shape[0], jnp.int32)
    out = moe_mlp(
        rows,
        w_gate_up,
        w_down,
        sizes,
        activation=activation,
        gate_up_pieces=gate_up_pieces,
        recipe=recipe,
        implementation=implementation,
    )
    return out.reshape(x.shape)


def check_gated_mlp(op: str, x: Any, weights: Mapping[str, Any]) -> None:
    """Raises unless weights, w_gate_up and w_down by their names in errors, are for x (..., d)."""
    for (name, w), dims in zip(weights.items(), ("(d, 2 f)", "(f, d)"), strict=True):
        check_weights(op, name, w)
        checks.check_ndim(op, name, w, 2, dims)
    (into, w_gate_up), (down, w_down) = weights.items()
    d, f = x.shape[-1], w_down.shape[0]
    if w_gate_up.shape != (d, 2 * f) or w_down.shape != (f, d):
        raise ValueError(
            f"{op}: {into} (d, 2 f) and {down} (f, d) must be for x (..., d); got "
            f"{checks.short_type(w_gate_up)} and {checks.short_type(w_down)} "
            f"for x {checks.short_type(x)}"
        )
