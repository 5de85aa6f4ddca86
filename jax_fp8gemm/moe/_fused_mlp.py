"""fused_mlp: moe_mlp and gated_mlp for recipes whose activation is quantised as it is computed.

_mlp_products.py says what is computed, and in which format.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import jax

from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.recipe import Format
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec, name_residual, quantize_args
from jax_fp8gemm._primitives.quantize import quantize_rows, rows_and_columns
from jax_fp8gemm._primitives.quantize_ragged import rows_and_ragged_columns
from jax_fp8gemm.moe import _mlp_products as products
from jax_fp8gemm.moe._mlp_specs import Specs
from jax_fp8gemm.moe._operands import MlpOperands

# The columns of x, what the products keep, the weights, and the groups.
_Kept: TypeAlias = tuple[ScaledArray | None, products.Residuals, products.Experts, Groups | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_mlp(specs: Specs, operands: MlpOperands) -> jax.Array:
    """Returns moe_mlp of operands that are checked, or gated_mlp where they have no groups."""
    x, w_gate_up, w_down, biases, groups = operands
    if groups is None:
        return products.dense_forward_alone(specs, x, w_gate_up, w_down)
    rows = _rows(specs.into, specs.into.recipe.fwd, x, groups)
    w = products.transposed_weights(specs, w_gate_up, w_down, biases)
    return products.forward_alone(specs, rows, w, groups)


def _fwd(specs: Specs, operands: MlpOperands) -> tuple[jax.Array, _Kept]:
    x, w_gate_up, w_down, biases, groups = operands
    kept, w = products.weights_both_ways(specs, w_gate_up, w_down, biases)
    recipe = specs.into.recipe
    column_block = recipe.wgrad_lhs_block
    rows, x_columns = _rows_and_columns(specs.into, recipe.fwd, x, groups, column_block)
    out, residuals = products.forward(specs, rows, w, groups)
    return out, (name_residual("lhs", x_columns), residuals, kept, groups)


def _bwd(specs: Specs, kept: _Kept, dout: jax.Array) -> tuple[Any]:
    x_columns, residuals, w, groups = kept
    douts, dout_columns = _rows_and_columns(specs.down, specs.into.recipe.bwd, dout, groups)
    columns = products.Columns(x_columns, dout_columns)
    gradients = products.backward(specs, residuals, w, douts, columns, groups, lambda: dout)
    operands: Any = MlpOperands  # whose types are those of operands, not of their gradients
    return (operands(*gradients, groups=None),)


fused_mlp.defvjp(_fwd, _bwd)


def _rows(
    spec: ProductSpec, fmt: Format | None, x: jax.Array, groups: Groups | None
) -> ScaledArray:
    """Quantises x along its last dimension. Only dense products read padded rows."""
    return quantize_rows(x, padded=groups is None, **quantize_args(spec, fmt))


def _rows_and_columns(
    spec: ProductSpec,
    fmt: Format | None,
    x: jax.Array,
    groups: Groups | None,
    column_block: tuple[int, int] = (1, 128),
) -> tuple[ScaledArray, ScaledArray | None]:
    """Quantises x along its last dimension and, if needed, along the tokens of each group, or all.

    A product reads the latter, with this scale block, for the gradient of its weights.
    """
    args = quantize_args(spec, fmt)
    if spec.rhs_dtype is None:
        return _rows(spec, fmt, x, groups), None
    if groups is None:
        return rows_and_columns(x, column_block, padded=True, **args)
    return rows_and_ragged_columns(x, *groups, column_block, **args)
