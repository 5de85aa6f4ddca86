"""local_layer: permute, moe_mlp and unpermute on one device, in fewer passes over the rows.

Rows are copied to their experts as they are quantised (_primitives/gather_quantize.py), and the
cotangent of each row, that of its token times the weight of its choice, as well: neither is stored
unquantised, nor is the latter rounded before. The rest is that of the three functions.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8gemm._ops.product_spec import ProductSpec, name_residual, quantize_args
from jax_fp8gemm._ops.weights import without_gradient
from jax_fp8gemm._primitives.gather_quantize import gather_quantize
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate, settle
from jax_fp8gemm.moe._choices import sort_choices, sum_of_rows, take_rows
from jax_fp8gemm.moe._mlp import moe_mlp
from jax_fp8gemm.moe._mlp_products import (
    Columns,
    backward,
    forward,
    transposed_weights,
    weights_both_ways,
)
from jax_fp8gemm.moe._mlp_specs import (
    Specs,
    check_num_experts,
    make_specs,
    with_operand_shardings,
)
from jax_fp8gemm.moe._operands import Groups, Weights
from jax_fp8gemm.moe._options import LayerOptions
from jax_fp8gemm.moe._permute import permute, unpermute


def local_layer(
    options: LayerOptions,
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    w_gate_up: Weights,
    w_down: Weights,
    *,
    max_rows: int | None = None,
) -> jax.Array:
    """unpermute(moe_mlp(permute(x, indices)), weights), x (m, d), for operands that are checked.

    max_rows: that the indices make at most, if they make fewer than all.
    """
    op = "moe_layer"
    num_experts = w_gate_up.shape[0]
    recipe, implementation = options.recipe, options.implementation
    check_num_experts(op, num_experts, w_gate_up)
    specs = make_specs(op, x, w_gate_up, w_down, recipe, implementation)
    if not recipe.is_fused:
        rows, group_sizes, order = permute(x, indices, num_experts)
        run = partial(moe_mlp, recipe=recipe, implementation=implementation)
        out = run(rows[:max_rows], w_gate_up, w_down, group_sizes)
        out = jnp.pad(out, ((0, rows.shape[0] - out.shape[0]), (0, 0)))
        return unpermute(out, order, weights)
    w_gate_up = without_gradient(op, "w_gate_up", w_gate_up)
    w_down = without_gradient(op, "w_down", w_down)
    tokens = [replicate(op, jnp.asarray(a)) for a in (x, weights, indices)]
    w_gate_up, w_down = jax.tree.map(lambda w: settle(op, jnp.asarray(w)), (w_gate_up, w_down))
    x, *tokens, w_gate_up, w_down = match_varying(*tokens, w_gate_up, w_down)
    specs = with_operand_shardings(specs, x, w_gate_up, w_down)
    return _layer(specs, x, *tokens, w_gate_up, w_down)


class Rows(NamedTuple):
    """What the choices (m, top_k) of the tokens make of them.

    groups: of the rows. choice: of each row, numbered through (m, top_k). order: the row of each
    choice.
    """

    groups: Groups
    choice: jax.Array
    order: jax.Array

    @property
    def token(self) -> jax.Array:
        """Of each row."""
        return self.choice // self.order.shape[1]


def _rows(indices: jax.Array, num_experts: int) -> Rows:
    group_sizes, choice, order = sort_choices(indices, num_experts)
    return Rows(Groups.of_sizes(group_sizes), choice, order)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(specs: Specs, x, weights, indices, w_gate_up: Weights, w_down: Weights) -> jax.Array:
    into, _ = specs
    rows = _rows(indices, w_gate_up.shape[0])
    args = quantize_args(into, into.recipe.fwd)
    (copies,) = gather_quantize(x, rows.token, None, *rows.groups, mode="row", **args)
    w = transposed_weights(specs, w_gate_up, w_down)
    out, _ = forward(specs, copies, w, rows.groups, is_differentiated=False)
    return _add_up(out, rows, weights)


def _layer_fwd(
    specs: Specs, x, weights, indices, w_gate_up: Weights, w_down: Weights
) -> tuple[Any, Any]:
    into, _ = specs
    rows = _rows(indices, w_gate_up.shape[0])
    copies, x_columns = _copy_and_quantize(into, into.recipe.fwd, x, rows, None)
    kept, w = weights_both_ways(specs, w_gate_up, w_down)
    out, residuals = forward(specs, copies, w, rows.groups, is_differentiated=True)
    kept = name_residual("lhs", x_columns), residuals, kept, out, rows, weights
    return _add_up(out, rows, weights), kept


def _layer_bwd(specs: Specs, kept: Any, dout: jax.Array) -> tuple[Any, ...]:
    x_columns, residuals, w, out, rows, weights = kept
    into, down = specs
    of_choice = take_rows(out, rows.order).astype(jnp.float32)
    dweights = jnp.sum(of_choice * dout.astype(jnp.float32)[:, None], axis=2)
    of_row = take_rows(weights.astype(jnp.float32).reshape(-1), rows.choice)
    copies, dout_columns = _copy_and_quantize(down, into.recipe.bwd, dout, rows, of_row)
    columns = Columns(x_columns, dout_columns)
    dx, dw_gate_up, dw_down = backward(specs, residuals, w, copies, columns, rows.groups)
    dx = sum_of_rows(dx, rows.order, None).astype(dx.dtype)
    return dx, dweights.astype(weights.dtype), None, dw_gate_up, dw_down


_layer.defvjp(_layer_fwd, _layer_bwd)


def _add_up(out: jax.Array, rows: Rows, weights: jax.Array) -> jax.Array:
    return sum_of_rows(out, rows.order, weights).astype(out.dtype)


def _copy_and_quantize(
    spec: ProductSpec, fmt: Any, x: jax.Array, rows: Rows, weights: jax.Array | None
) -> tuple[Any, Any]:
    """The row of each choice, and ragged columns where the product's rhs has a gradient."""
    run = partial(gather_quantize, x, rows.token, weights, *rows.groups, **quantize_args(spec, fmt))
    if spec.rhs_dtype is None:
        (copies,) = run(mode="row")
        return copies, None
    copies, columns = run(mode="row_column")
    return copies, columns
