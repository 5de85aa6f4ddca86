"""The gradients of the experts' weights, from the rows of a turn."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec, quantize_args
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.gather_quantize import gather_quantize
from jax_fp8gemm._primitives.swiglu_quantize import swiglu_quantize
from jax_fp8gemm.moe._biases import Biases
from jax_fp8gemm.moe._mlp_products import bias_gradients, weight_gradient
from jax_fp8gemm.moe._mlp_specs import Specs
from jax_fp8gemm.moe._parallel.rows import Received, Turn, dequantized_rows
from jax_fp8gemm.moe._parallel.turn import RowGradients


class WeightGradients(NamedTuple):
    """The gradients of the experts; that of weights which are quantised already is None.

    Those of biases are f32.
    """

    w_gate_up: jax.Array | None
    w_down: jax.Array | None
    biases: Biases | None


def weight_gradients(
    products: Specs,
    received: Received,
    douts: ScaledArray,
    of_rows: RowGradients,
    has_biases: bool,
    accum: WeightGradients | None = None,
) -> WeightGradients:
    """Returns what the rows of a turn add to the gradients of the experts.

    accum: f32 gradients to which the products add their own in place, or None.
    """
    rows, weights, gate_up, h_columns, dh, da_columns = of_rows
    to_gate_up, to_down, to_biases = accum or WeightGradients(None, None, None)
    dw_gate_up = _gate_up_gradient(products.into, received.tokens, rows, da_columns, to_gate_up)
    dw_down = _down_gradient(products, gate_up, h_columns, douts, rows, weights, to_down)
    if not has_biases:
        return WeightGradients(dw_gate_up, dw_down, None)
    dout = dequantized_rows(douts, rows) * weights[:, None]
    dh = (dh.astype(jnp.float32) * weights[:, None]).astype(dh.dtype)
    dbiases = bias_gradients(products, gate_up, dh, dout, rows.groups)
    if to_biases is not None:
        dbiases = jax.tree.map(jnp.add, to_biases, dbiases)
    return WeightGradients(dw_gate_up, dw_down, dbiases)


def _gate_up_gradient(
    spec: ProductSpec,
    tokens: ScaledArray,
    rows: Turn,
    da_columns: ScaledArray | None,
    accum: jax.Array | None,
) -> jax.Array | None:
    if spec.rhs_dtype is None:
        return None
    args = quantize_args(spec, spec.recipe.fwd)
    mode = modes.of_columns(spec.recipe.wgrad_lhs_block, with_rows=False)
    (x_columns,) = gather_quantize(tokens, rows.token, None, *rows.groups, mode=mode, **args)
    return weight_gradient(spec, x_columns, da_columns, rows.groups, accum)


def _down_gradient(
    specs: Specs,
    gate_up: jax.Array,
    h_columns: ScaledArray | None,
    douts: ScaledArray,
    rows: Turn,
    weights: jax.Array,
    accum: jax.Array | None,
) -> jax.Array | None:
    spec = specs.down
    if spec.rhs_dtype is None:
        return None
    fwd_args, bwd_args = (quantize_args(spec, fmt) for fmt in (spec.recipe.fwd, spec.recipe.bwd))
    if h_columns is None:
        how: dict[str, Any] = dict(with_columns=True, column_block=spec.recipe.wgrad_lhs_block)
        _, h_columns = swiglu_quantize(
            gate_up, *rows.groups, activation=specs.activation, **how, **fwd_args
        )
    (dout_columns,) = gather_quantize(
        douts, rows.token, weights, *rows.groups, mode="column", **bwd_args
    )
    return weight_gradient(spec, h_columns, dout_columns, rows.groups, accum)
