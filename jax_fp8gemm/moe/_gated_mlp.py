"""gated_mlp: one gated MLP for every token, as a moe_mlp of one expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm.moe._mlp import moe_mlp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def gated_mlp(
    x: Float[Array, "*batch d"],
    w_gate_up: Float[Array, "d two_f"] | ScaledArray,
    w_down: Float[Array, "f d"] | ScaledArray,
    *,
    activation: Activation = "silu",
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
) -> Float[Array, "*batch d"]:
    """Applies one gated MLP to every token: (act(x . gate) * (x . up)) . down.

    It is moe_mlp with one group. So the activation is quantised as it is computed.

    Args:
      x: (..., d) bf16, f16 or f32.
      w_gate_up: (d, 2 f), gate | up, and w_down: (f, d), like x or ScaledArrays, as for moe_mlp.
      activation, recipe, implementation: as for moe_mlp.
    Returns:
      (..., d) array of the dtype of x.
    Raises:
      As moe_mlp.
    """
    rows = x.reshape(-1, x.shape[-1])
    w_gate_up, w_down = jax.tree.map(lambda w: jnp.expand_dims(w, 0), (w_gate_up, w_down))
    sizes = jnp.full((1,), rows.shape[0], jnp.int32)
    out = moe_mlp(
        rows,
        w_gate_up,
        w_down,
        sizes,
        activation=activation,
        recipe=recipe,
        implementation=implementation,
    )
    return out.reshape(x.shape)
