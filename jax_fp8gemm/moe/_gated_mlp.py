"""gated_mlp: one gated MLP for every token, FP8 inside, with its own derivatives.

_mlp_products.py says what is computed, and in which format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.activation import Activation, check_activation
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.product_spec import check_recipe
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._ops.weights import check_weights, refusing_gradients
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh, reshape, reshard
from jax_fp8gemm._sharding.manual_axes import match_varying, settle
from jax_fp8gemm.moe._fused_mlp import fused_mlp
from jax_fp8gemm.moe._mlp import moe_mlp
from jax_fp8gemm.moe._mlp_specs import make_specs, with_operand_shardings
from jax_fp8gemm.moe._operands import MlpOperands
from jax_fp8gemm.moe._pieces import check_pieces

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@naming_devices
@jax.named_scope("fp8gemm_gated_mlp")
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

    The activation is quantised as it is computed, as in moe_mlp. The products are those of matmul:
    on a mesh, under jit, each device multiplies its tokens, and devices add their parts of the
    gradients of weights, in f32 unless recipe.reduce_dtype says otherwise. A shard must hold whole
    scale blocks, multiples of 128 tokens, else the tokens are gathered.

    Args:
      x: (..., d) bf16, f16 or f32. Blocks of 128 tokens, for gradients of weights, are counted over
        all leading dimensions.
      w_gate_up: (d, 2 f), gate | up, and w_down: (f, d), like x or quantised, as for moe_mlp.
      activation, gate_up_pieces, recipe, implementation: as for moe_mlp.
    Returns:
      (..., d) array of the dtype of x.
    Raises:
      TypeError: a dtype, or no array. ValueError: shapes that do not fit. Others as moe_mlp.

    The backward pass keeps what that of moe_mlp does, under the same names. A recipe whose
    activation stays unquantised, as BF16, is a moe_mlp of one group.
    """
    op = "gated_mlp"
    x, w_gate_up, w_down = map(arrays.as_array, (x, w_gate_up, w_down))
    check_unquantised(op, "x", x)
    checks.check_min_ndim(op, "x", x, 1, "(..., d)")
    check_gated_mlp(op, x, {"w_gate_up": w_gate_up, "w_down": w_down})
    check_activation(op, activation)
    pieces = check_pieces(op, "w_gate_up", w_gate_up, gate_up_pieces)
    recipe = check_recipe(op, recipe)
    x = jnp.asarray(x)
    rows = reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    if not recipe.is_fused:
        out = _mlp_of_one_group(
            rows,
            w_gate_up,
            w_down,
            activation=activation,
            gate_up_pieces=pieces,
            recipe=recipe,
            implementation=implementation,
        )
        return _like(out, x)
    specs = make_specs(op, rows, w_gate_up, w_down, recipe, implementation, activation, pieces)
    rows = refusing_gradients(op, dict(w_gate_up=w_gate_up, w_down=w_down), rows)
    operands = rows, w_gate_up, w_down
    settled = jax.tree.map(lambda w: settle(op, jnp.asarray(w)), operands)
    rows, w_gate_up, w_down = match_varying(*settled)
    specs = with_operand_shardings(specs, rows, w_gate_up, w_down)
    operands = MlpOperands(rows, w_gate_up, w_down, biases=None, groups=None)
    out = reverse_mode(op, partial(fused_mlp, specs), operands)
    return _like(out, x)


def _like(out: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the rows `out` in the shape of `x`, and cut as `x` is by Explicit mesh axes."""
    spec = None
    if explicit_mesh(x) is not None:
        spec = PartitionSpec(*jax.typeof(x).sharding.spec.partitions)
    return reshard(reshape(out, x.shape), spec)


def _mlp_of_one_group(rows: jax.Array, w_gate_up: Any, w_down: Any, **how: Any) -> jax.Array:
    w_gate_up, w_down = jax.tree.map(lambda w: jnp.expand_dims(w, 0), (w_gate_up, w_down))
    return moe_mlp(rows, w_gate_up, w_down, jnp.full((1,), rows.shape[0], jnp.int32), **how)


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
