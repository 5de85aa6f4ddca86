"""One turn of rows, forward and backward: what the experts of one device compute at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data.groups import Groups, group_of_rows
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.grouped_products import grouped_gemm_as
from jax_fp8gemm._ops.product_spec import ProductSpec, name_residual, quantize_args
from jax_fp8gemm._primitives.sum_rows import sum_rows
from jax_fp8gemm._primitives.weighted_swiglu_grad import weighted_swiglu_grad_quantize
from jax_fp8gemm.moe._biases import rows_of_bias
from jax_fp8gemm.moe._choices import take_rows
from jax_fp8gemm.moe._kept_gate_up import keep, read
from jax_fp8gemm.moe._mlp_products import (
    Experts,
    Residuals,
    gate_up_product,
    hidden,
    hidden_gradient,
    hidden_of_rows,
)
from jax_fp8gemm.moe._mlp_specs import Specs
from jax_fp8gemm.moe._parallel.exchange_kinds import TurnNumber
from jax_fp8gemm.moe._parallel.rows import Received, Turn, copy_tokens
from jax_fp8gemm.moe._parallel.strips import WHOLE, Strips, down_product_in_strips
from jax_fp8gemm.moe._row_sums import sum_of_rows


class Results(NamedTuple):
    """What the rows of a turn give in the forward pass.

    Attributes:
      out: (r, d), the weighted sums of the rows of each received token; or what Strips.give_back
        makes of them.
      gate_up: (rows, 2 f); None where nobody reads it.
      h_columns: h, quantised along the tokens of each group; None where nobody reads it.
    """

    out: jax.Array
    gate_up: jax.Array | None
    h_columns: ScaledArray | None


class TokenGradients(NamedTuple):
    """The gradients of the tokens (r, d) and of the weights (r, top_k) of their choices."""

    x: jax.Array
    weights: jax.Array


class RowGradients(NamedTuple):
    """What weight_gradients reads of the rows of a turn.

    Attributes:
      rows: which they are.
      weights: (rows,), the f32 weight of the choice of each row.
      gate_up: the product of the forward pass, as the backward pass reads it.
      h_columns: h, quantised along the tokens of each group; None if gate_up is to give it again.
      dh: (rows, f), the gradient of h for weights of 1.
      da_columns: the gradient of gate_up, quantised as h_columns is.
    """

    rows: Turn
    weights: jax.Array
    gate_up: jax.Array
    h_columns: ScaledArray | None
    dh: jax.Array
    da_columns: ScaledArray | None


def forward_turn(
    products: Specs,
    received: Received,
    columns: Sequence[jax.Array],
    rows: Turn,
    w: Experts,
    *,
    strips: Strips = WHOLE,
    with_columns: bool = False,
    keeps_gate_up: bool = False,
) -> Results:
    """Returns what these rows give.

    columns: those (r,) of received.weights, for recipes with batch_invariant.
    strips: in which results are computed, and what is done with each.
    with_columns: whether h_columns is computed. gate_up then has its name of CHECKPOINT_NAMES: a
      policy that saves it alone has h_columns computed again from what is saved.
    keeps_gate_up: whether gate_up is among the results; with_columns implies it.
    """
    if keeps_gate_up or with_columns:
        gate_up = _gate_up(products, received, rows, w)
        if with_columns:
            gate_up = name_residual("out", gate_up)
        h, h_columns = hidden(products, gate_up, rows.groups, with_columns=with_columns)
    else:
        lhs = copy_tokens(received.tokens, rows, products.into.implementation)
        h, h_columns, gate_up = hidden_of_rows(products, lhs, w, rows.groups), None, None
    sums = partial(_sums, products.into, rows, received.weights, columns)
    out = down_product_in_strips(products, h, w, rows.groups, strips, sums)
    return Results(out, gate_up, h_columns)


def _sums(
    spec: ProductSpec,
    rows: Turn,
    weights: jax.Array,
    columns: Sequence[jax.Array] | None,
    x: jax.Array,
) -> jax.Array:
    """Returns the weighted sums (r, d) of the rows x of each received token, in the dtype of x.

    columns: the weights (r, top_k) as sum_of_rows takes them, for recipes with batch_invariant.
    """
    if not spec.recipe.batch_invariant:
        weights = weights.astype(jnp.float32)
        return sum_rows(x, rows.places, weights, implementation=spec.implementation)
    how = rows.order, columns, rows.has_row
    return sum_of_rows(x, *how, dtype=x.dtype, batch_invariant=True)


def _gate_up(products: Specs, received: Received, rows: Turn, w: Experts) -> jax.Array:
    lhs = copy_tokens(received.tokens, rows, products.into.implementation)
    return gate_up_product(products, lhs, w, rows.groups)


def backward_turn(
    products: Specs,
    received: Received,
    douts: ScaledArray,
    rows: Turn,
    turn: TurnNumber,
    w: Experts,
    residuals: Residuals | None,
) -> tuple[TokenGradients, RowGradients]:
    """Returns what the rows of a turn add to the gradients of tokens.

    The second result is what weight_gradients needs of them.

    residuals: what the forward pass kept. None: nothing, and gate_up is computed again.
    """
    if residuals is None:
        w_gate_up = _transpose_in_turn(w.gate_up, turn)
        gate_up = _gate_up(products, received, rows, w._replace(gate_up=w_gate_up))
        residuals = Residuals(None, keep(products.into, gate_up))
    h_columns, kept = residuals
    with jax.named_scope("dlhs"):
        copies = copy_tokens(douts, rows, products.down.implementation)
    gate_up, dh = read(products.into, kept, hidden_gradient(products, copies, w, rows.groups))
    weights = take_rows(received.weights.reshape(-1), rows.choice).astype(jnp.float32)
    of_rows = gate_up, dh, weights, w, rows.groups
    dx, da_columns, dots = _row_gradient(products, *of_rows)
    if w.biases is not None:
        bias = rows_of_bias(w.biases.down, group_of_rows(*rows.groups, rows.token.size))
        dots += jnp.sum(bias * copies.dequantize(jnp.float32), axis=1)
    dweights = jnp.where(rows.has_row, take_rows(dots, rows.order), 0)
    dx = _sums(products.into, rows, jnp.ones_like(received.weights), None, dx)
    return TokenGradients(dx, dweights), RowGradients(
        rows, weights, gate_up, h_columns, dh, da_columns
    )


def _row_gradient(
    specs: Specs,
    gate_up: jax.Array,
    dh: jax.Array,
    weights: jax.Array,
    w: Experts,
    groups: Groups,
) -> tuple[jax.Array, ScaledArray | None, jax.Array]:
    """Returns dx (m, d), and the columns of da if w_gate_up has a gradient; and the dots (m,).

    da is computed of dh times the weights (m,) of rows. dots: the sums of h * dh along rows.
    """
    into = specs.into
    args = quantize_args(into, into.recipe.bwd)
    assert specs.pieces == 1  # of a layer whose experts devices divide
    how: dict[str, Any] = dict(activation=specs.activation, with_columns=into.rhs_dtype is not None)
    da, da_columns, dots = weighted_swiglu_grad_quantize(
        gate_up, dh, weights, *groups, **how, **args
    )
    with jax.named_scope("dlhs"):
        of_dx = into.shardings.lhs, specs.unused_rows
        dx = grouped_gemm_as(into, into.lhs_dtype, da, w.gate_up, *groups, *of_dx)
    return dx, da_columns, dots


def _transpose_in_turn(w: ScaledArray, turn: TurnNumber) -> ScaledArray:
    """Returns w.T, which XLA computes in the loop over turns.

    XLA would compute it before the loop, for it does not depend on the turn. The loop over turns of
    the exchange stands in no branch, so that would be done even if no turn is left. The barrier
    makes it depend. XLA may also give the loop's operand the layout of the transpose, for which it
    copies w before the loop. An array of one dimension has no other layout.
    """

    def hide(x: jax.Array) -> jax.Array:
        flat, _ = lax.optimization_barrier((x.reshape(-1), turn))
        return flat.reshape(x.shape)

    return jax.tree.map(hide, w).T
