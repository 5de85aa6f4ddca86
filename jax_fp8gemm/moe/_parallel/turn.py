"""One turn of rows, forward and backward: what the experts of one device compute at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data.groups import group_of_rows
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec, name_residual, quantize_args
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.gated import gated
from jax_fp8gemm._primitives.gather_quantize import gather_quantize
from jax_fp8gemm._primitives.sum_rows import sum_rows
from jax_fp8gemm._primitives.swiglu_quantize import swiglu_quantize
from jax_fp8gemm.moe._biases import Biases, rows_of_bias
from jax_fp8gemm.moe._choices import take_rows
from jax_fp8gemm.moe._kept_gate_up import keep, read
from jax_fp8gemm.moe._mlp_products import (
    Experts,
    Residuals,
    bias_gradients,
    down_strip,
    gate_up_product,
    hidden,
    hidden_gradient,
    row_gradient,
    weight_gradient,
)
from jax_fp8gemm.moe._mlp_specs import Specs
from jax_fp8gemm.moe._parallel.exchange_kinds import TurnNumber
from jax_fp8gemm.moe._parallel.parts import after
from jax_fp8gemm.moe._parallel.rows import Received, Turn, copy_tokens, dequantized_rows
from jax_fp8gemm.moe._row_sums import sum_of_rows

GiveBack: TypeAlias = Callable[[jax.Array], jax.Array]


class Strips(NamedTuple):
    """How a forward pass computes its results: in strips of columns, one after another.

    Attributes:
      number: of strips of equal width, a multiple of 128 if there are several.
      give_back: what is done with each strip; the product of the next one does not wait for it.
    """

    number: int = 1
    give_back: GiveBack = lambda sums: sums


WHOLE = Strips()


class Results(NamedTuple):
    """What the rows of a turn give in the forward pass.

    Attributes:
      out: (r, d), the weighted sums of the rows of each received token; or what Strips.give_back
        makes of them.
      gate_up: (rows, 2 f).
      h_columns: h, quantised along the tokens of each group; None where nobody reads it.
    """

    out: jax.Array
    gate_up: jax.Array
    h_columns: ScaledArray | None


class TokenGradients(NamedTuple):
    """The gradients of the tokens (r, d) and of the weights (r, top_k) of their choices."""

    x: jax.Array
    weights: jax.Array


class WeightGradients(NamedTuple):
    """The gradients of the experts; that of weights which are quantised already is None.

    Those of biases are f32.
    """

    w_gate_up: jax.Array | None
    w_down: jax.Array | None
    biases: Biases | None


class RowGradients(NamedTuple):
    """What weight_gradients reads of the rows of a turn.

    Attributes:
      rows: which they are.
      weights: (rows,), the f32 weight of the choice of each row.
      gate_up: the product of the forward pass, as the backward pass reads it.
      h_columns: h, quantised along the tokens of each group; None if gate_up is to give it again.
      dh: (rows, f), the gradient of h.
      da_columns: the gradient of gate_up, quantised as h_columns is.
    """

    rows: Turn
    weights: jax.Array
    gate_up: jax.Array
    h_columns: ScaledArray | None
    dh: jax.Array
    da_columns: ScaledArray | None


class Gradients(NamedTuple):
    """The gradients of the operands; that of weights which are quantised already is None.

    x is (r, d) and weights (r, top_k), for r tokens. Those of biases are f32.
    """

    x: jax.Array
    weights: jax.Array
    w_gate_up: jax.Array | None
    w_down: jax.Array | None
    biases: Biases | None


def forward_turn(
    products: Specs,
    received: Received,
    columns: Sequence[jax.Array],
    rows: Turn,
    w: Experts,
    *,
    strips: Strips = WHOLE,
    with_columns: bool = False,
) -> Results:
    """Returns what these rows give.

    columns: those (r,) of received.weights, for recipes with batch_invariant.
    with_columns: whether h_columns is computed. gate_up then has its name of CHECKPOINT_NAMES: a
      policy that saves it alone has h_columns computed again from what is saved.
    """
    gate_up = _gate_up(products, received, rows, w)
    if with_columns:
        gate_up = name_residual("out", gate_up)
    h, h_columns = hidden(products, gate_up, rows.groups, with_columns=with_columns)
    outs: list[jax.Array] = []
    sums = ()
    for strip in range(strips.number):
        # XLA would compute all products first, and then all sums in one kernel.
        h = after(h, *sums)
        product = down_strip(products, h, w, rows.groups, strip, strips.number)
        # Nothing else then runs beside the strip before, or XLA would start that later.
        product = after(product, *outs[-1:])
        sums = (_sums(products.into, product, rows, received.weights, columns),)
        outs.append(strips.give_back(*sums))
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)
    return Results(out, gate_up, h_columns)


def _sums(
    spec: ProductSpec,
    x: jax.Array,
    rows: Turn,
    weights: jax.Array,
    columns: Sequence[jax.Array] | None,
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
    dh = dh.astype(jnp.float32)
    dots = jnp.sum(gated(gate_up, products.activation) * dh, axis=1)
    if w.biases is not None:
        bias = rows_of_bias(w.biases.down, group_of_rows(*rows.groups, rows.token.size))
        dots += jnp.sum(bias * copies.dequantize(jnp.float32), axis=1)
    dweights = jnp.where(rows.has_row, take_rows(dots, rows.order), 0)
    weights = take_rows(received.weights.reshape(-1), rows.choice).astype(jnp.float32)
    dh = (dh * weights[:, None]).astype(gate_up.dtype)
    dx, da_columns = row_gradient(products, gate_up, dh, w, rows.groups)
    dx = _sums(products.into, dx, rows, jnp.ones_like(received.weights), None)
    return TokenGradients(dx, dweights), RowGradients(
        rows, weights, gate_up, h_columns, dh, da_columns
    )


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
