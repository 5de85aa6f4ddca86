"""local_layer: permute, moe_mlp and unpermute on one device, in fewer passes over the rows.

Rows are quantised as they are copied to their experts (_primitives/gather_quantize.py). So are
their cotangents: that of a row is the one of its token times the weight of its choice, in f32.
Neither is stored unquantised. The rest is computed as the three functions compute it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.recipe import Format
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec, name_residual, quantize_args
from jax_fp8gemm._ops.weights import refusing_gradients
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.gather_quantize import gather_quantize
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate, settle
from jax_fp8gemm.moe import _mlp_products as products
from jax_fp8gemm.moe._choices import sort_choices, take_rows
from jax_fp8gemm.moe._mlp import moe_mlp
from jax_fp8gemm.moe._mlp_specs import (
    Specs,
    check_num_experts,
    make_specs,
    with_operand_shardings,
)
from jax_fp8gemm.moe._operands import Operands
from jax_fp8gemm.moe._options import OP, LayerOptions
from jax_fp8gemm.moe._permute import permute, unpermute
from jax_fp8gemm.moe._row_sums import dots_of_rows, sum_of_rows


def local_layer(
    options: LayerOptions, operands: Operands, *, max_rows: int | None = None
) -> jax.Array:
    """Returns unpermute(moe_mlp(permute(x, indices)), weights) for operands that are checked.

    max_rows: a bound on the rows that the indices make, if it is known to be below m * top_k.
    """
    x, w_gate_up, w_down = operands.x, operands.w_gate_up, operands.w_down
    recipe, implementation = options.recipe, options.implementation
    check_num_experts(OP, w_gate_up.shape[0], w_gate_up)
    how = options.activation, options.gate_up_pieces
    specs = make_specs(OP, x, w_gate_up, w_down, recipe, implementation, *how)
    if not recipe.is_fused:
        return _unfused_layer(options, operands, max_rows)
    operands = _settled(operands)
    specs = with_operand_shardings(specs, operands.x, operands.w_gate_up, operands.w_down)
    return _layer(specs, operands)


def _unfused_layer(options: LayerOptions, operands: Operands, max_rows: int | None) -> jax.Array:
    w_gate_up, w_down = operands.w_gate_up, operands.w_down
    rows, group_sizes, order = permute(operands.x, operands.indices, w_gate_up.shape[0])
    out = moe_mlp(
        rows[:max_rows],
        w_gate_up,
        w_down,
        group_sizes,
        biases=operands.biases,
        **options.of_mlp,
    )
    out = jnp.pad(out, ((0, rows.shape[0] - out.shape[0]), (0, 0)))
    return unpermute(out, order, operands.weights)


def _settled(operands: Operands) -> Operands:
    """Returns the operands with types over mesh axes that `_layer` can take."""
    x, indices, weights, w_gate_up, w_down, biases = operands
    x = refusing_gradients(OP, dict(w_gate_up=w_gate_up, w_down=w_down), jnp.asarray(x))
    whole = lambda x: replicate(OP, jnp.asarray(x))
    x, indices, weights = map(whole, (x, indices, weights))
    settled = lambda tree: jax.tree.map(lambda w: settle(OP, jnp.asarray(w)), tree)
    w_gate_up, w_down, biases = map(settled, (w_gate_up, w_down, biases))
    return Operands(*match_varying(x, indices, weights, w_gate_up, w_down, biases))


class Rows(NamedTuple):
    """The rows that the choices (m, top_k) of the tokens make, sorted by expert.

    Attributes:
      groups: the groups of the rows, one for each expert.
      choice: (rows,), the choice that each row comes from, numbered through (m, top_k).
      order: (m, top_k), the row of each choice.
    """

    groups: Groups
    choice: jax.Array
    order: jax.Array

    @property
    def token(self) -> jax.Array:
        """The token that each row is a copy of."""
        return self.choice // self.order.shape[1]


class Kept(NamedTuple):
    """What the forward pass of `_layer` keeps for the backward pass."""

    x_columns: ScaledArray | None
    residuals: products.Residuals
    experts: products.Experts
    out: jax.Array
    rows: Rows
    weights: jax.Array


def _rows(operands: Operands) -> Rows:
    """Returns the rows that the choices of the operands make."""
    group_sizes, choice, order = sort_choices(operands.indices, operands.w_gate_up.shape[0])
    return Rows(Groups.of_sizes(group_sizes), choice, order)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(specs: Specs, operands: Operands) -> jax.Array:
    rows = _rows(operands)
    args = quantize_args(specs.into, specs.into.recipe.fwd)
    (copies,) = gather_quantize(operands.x, rows.token, None, *rows.groups, mode="row", **args)
    w = products.transposed_weights(specs, operands.w_gate_up, operands.w_down, operands.biases)
    out = products.forward_alone(specs, copies, w, rows.groups)
    return _add_up(specs, out, rows, operands.weights)


def _layer_fwd(specs: Specs, operands: Operands) -> tuple[jax.Array, Kept]:
    rows = _rows(operands)
    fmt = specs.into.recipe.fwd
    column_block = specs.into.recipe.wgrad_lhs_block
    copies, x_columns = _copy_and_quantize(specs.into, fmt, operands.x, rows, None, column_block)
    experts, w = products.weights_both_ways(
        specs, operands.w_gate_up, operands.w_down, operands.biases
    )
    out, residuals = products.forward(specs, copies, w, rows.groups)
    x_columns = name_residual("lhs", x_columns)
    kept = Kept(x_columns, residuals, experts, out, rows, operands.weights)
    return _add_up(specs, out, rows, operands.weights), kept


def _layer_bwd(specs: Specs, kept: Kept, dout: jax.Array) -> tuple[Operands]:
    rows, weights = kept.rows, kept.weights
    is_invariant = specs.into.recipe.batch_invariant
    dweights = dots_of_rows(
        kept.out, rows.order, dout, dtype=weights.dtype, batch_invariant=is_invariant
    )
    weight_of_rows = take_rows(weights.astype(jnp.float32).reshape(-1), rows.choice)
    fmt = specs.into.recipe.bwd
    douts, dout_columns = _copy_and_quantize(specs.down, fmt, dout, rows, weight_of_rows)
    columns = products.Columns(kept.x_columns, dout_columns)
    dout_of_rows = lambda: take_rows(dout, rows.token).astype(jnp.float32) * weight_of_rows[:, None]
    dx, *gradients = products.backward(
        specs, kept.residuals, kept.experts, douts, columns, rows.groups, dout_of_rows
    )
    dx = sum_of_rows(dx, rows.order, None, dtype=dx.dtype, batch_invariant=is_invariant)
    return (Operands._make((dx, None, dweights, *gradients)),)


_layer.defvjp(_layer_fwd, _layer_bwd)


def _add_up(specs: Specs, out: jax.Array, rows: Rows, weights: jax.Array) -> jax.Array:
    """Returns the weighted sum of the rows of each token."""
    is_invariant = specs.into.recipe.batch_invariant
    columns = tuple(weights.T)
    return sum_of_rows(out, rows.order, columns, dtype=out.dtype, batch_invariant=is_invariant)


def _copy_and_quantize(
    spec: ProductSpec,
    fmt: Format | None,
    x: jax.Array,
    rows: Rows,
    weights: jax.Array | None,
    column_block: tuple[int, int] = (1, 128),
) -> tuple[ScaledArray, ScaledArray | None]:
    """Quantises the row of each choice, and along the tokens of each group if needed.

    A product reads the latter, with this scale block, for the gradient of its weights.
    """
    run = partial(gather_quantize, x, rows.token, weights, *rows.groups, **quantize_args(spec, fmt))
    if spec.rhs_dtype is None:
        (copies,) = run(mode="row")
        return copies, None
    copies, columns = run(mode=modes.of_columns(column_block, with_rows=True))
    return copies, columns
