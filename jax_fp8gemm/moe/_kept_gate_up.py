"""gate_up between the passes: as it is or, with kept_gate_up="fp8" in the recipe, in FP8.

The forward pass reads gate_up unquantised in either case. In FP8 it has the format of the forward
pass and 1x128 scales along its features (DeepSeek-V3 report, section 3.3.3). The backward pass
reads value * scale, rounded to the dtype that gate_up had.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data.kept_rounding import rounded
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec, name_residual, quantize_args
from jax_fp8gemm._ops.quantize import quantize

KeptGateUp: TypeAlias = jax.Array | ScaledArray


def keep(spec: ProductSpec, gate_up: jax.Array) -> KeptGateUp:
    """Returns what is kept of gate_up (m, 2 f). spec: that of the product that it results from."""
    if spec.recipe.kept_gate_up == "unquantised":
        return gate_up
    return quantize(gate_up, **quantize_args(spec, spec.recipe.fwd))


def read(spec: ProductSpec, kept: KeptGateUp, dh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns gate_up in its dtype, and dh, for the backward pass."""
    if not isinstance(kept, ScaledArray):
        return kept, dh
    # NOTE: without dh in this barrier XLA may dequantise in the forward pass and keep the result.
    # Its CPU compiler drops the barrier first, and does so outside of loops over layers.
    values, scale, dh = lax.optimization_barrier((kept.values, kept.scale, dh))
    gate_up = ScaledArray(values, scale).dequantize(jnp.float32)
    return rounded(gate_up, spec.out_dtype), dh


def name_columns(kept: KeptGateUp, h_columns: ScaledArray | None) -> ScaledArray | None:
    """Returns the columns of h under their name of CHECKPOINT_NAMES, or names.

    From gate_up in FP8 they could not be computed again. So a policy that saves results saves them
    too, and no product runs again.
    """
    h_columns = name_residual("lhs", h_columns)
    return name_residual("out", h_columns) if isinstance(kept, ScaledArray) else h_columns
