"""expert_mlp: the experts of an expert-parallel layer, on tokens that travel as FP8.

On each device of the expert axis, inside shard_map, with the FP8 format in brackets:

    x        [1x128, power-of-two scales]  sent to the devices of the token's experts
    rows     the tokens of each local expert, copied from those received, in FP8
    partial  the weighted results of a token's local experts, in the dtype of x; sent back and added

    dout     [1x128, power-of-two scales]  sent as x was
    dx       summed over the local experts in the dtype of x; sent back and added

The products are those of _moe_mlp.py. Scales of what travels are powers of two, whatever the
recipe (DeepSeek-V3 report, section 3.3.3): the weight gradients read x and dout in other blocks,
and requantising then moves next to no value.

An expert takes as many tokens as it gets. Rows are computed `rows` at a time, a number that evenly
spread choices do not reach: it bounds the memory, and a turn more is taken only where it is passed.
What turns contribute to a token or a weight is added in the dtype of the sum. gate_up of the first
turn is kept for the backward pass; that of the others is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._exchange import Exchange
from jax_fp8gemm._matmul_spec import MatmulSpec, name_residual, quantize_args
from jax_fp8gemm._permute import sort_choices, sum_of_rows, take_rows
from jax_fp8gemm._quantize import quantize
from jax_fp8gemm._quantize_ragged import ragged_columns
from jax_fp8gemm._ragged_dot import gemm_as, wgrad_as
from jax_fp8gemm._scaled_array import ScaledArray, spread_scale
from jax_fp8gemm._swiglu import swiglu, swiglu_grad_quantize, swiglu_quantize
from jax_fp8gemm._weights import both_ways


@dataclass(frozen=True)
class ExpertSpec:
    """What is static about the layer.

    Attributes:
      into, down: the products with w_gate_up and with w_down.
      exchange: of tokens.
      experts: on each device.
      rows: computed in a turn.
      has_one_turn: whether `rows` holds all rows, whatever the choices.
    """

    into: MatmulSpec
    down: MatmulSpec
    exchange: Exchange
    experts: int
    rows: int
    has_one_turn: bool


class _Weights(NamedTuple):
    """Quantised weights; the forward pass has their transposes."""

    gate_up: ScaledArray
    down: ScaledArray


class _Received(NamedTuple):
    """Tokens (r, d), the weights (r, top_k) of their choices, and the rows that those make.

    sizes: rows of each local expert. choice: of each row, numbered through (r, top_k). order:
    (r, top_k), the row of each choice; a choice of no local expert has one behind all groups.
    """

    tokens: ScaledArray
    weights: jax.Array
    sizes: jax.Array
    choice: jax.Array
    order: jax.Array


class _Turn(NamedTuple):
    """The rows of one turn: their groups, their choices and tokens, and the row of each choice."""

    groups: tuple[jax.Array, jax.Array]  # group_sizes, and the row where the first group starts
    choice: jax.Array
    token: jax.Array
    order: jax.Array
    has_row: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_mlp(spec: ExpertSpec, x, weights, w_gate_up: Any, w_down: Any, indices) -> jax.Array:
    """The weighted sum over the choices of each token of its experts' results, (t, d).

    Args:
      x: (t, d), the tokens of this device.
      weights, indices: (t, top_k), of their choices; experts are numbered along the axis, any
        other number is no expert.
      w_gate_up, w_down: (experts, d, 2 f) and (experts, f, d), the experts of this device.
    """
    return _forward(spec, x, weights, w_gate_up, w_down, indices)[0]


def _forward(spec: ExpertSpec, x, weights, w_gate_up: Any, w_down: Any, indices):
    """Quantises for both passes; under jit, what no wanted cotangent reads is not computed."""
    exchange, fmt = spec.exchange, spec.into.recipe.fwd
    gate_up_ways, down_ways = (
        both_ways(spec.into, fmt, w_gate_up),
        both_ways(spec.down, fmt, w_down),
    )
    kept_weights, w = map(_Weights, gate_up_ways, down_ways)
    tokens = quantize(x, **_travel_args(spec.into, fmt))
    plan = exchange.plan(indices // spec.experts)
    sent = tokens, weights, indices

    def run(turn: Any) -> tuple[jax.Array, _Received, jax.Array]:
        received = _receive(spec, plan, turn, *sent)
        partial_sums, gate_up = _forward_turn(spec, received, 0, w)
        step = lambda turn: _forward_turn(spec, received, turn, w)[0]
        partial_sums = _add_turns(partial_sums, _num_turns(spec, received), step)
        return exchange.give_back(plan, turn, partial_sums), received, gate_up

    out, received, gate_up = run(0)
    out = _add_turns(out, exchange.num_turns(plan), lambda turn: run(turn)[0]).astype(x.dtype)
    kept = name_residual("lhs", received), name_residual("out", gate_up)
    kept_weights = name_residual("rhs", kept_weights)
    # What is sent again in the turns after the first.
    again = None if exchange.has_one_turn else name_residual("lhs", sent)
    return name_residual("out", out), (*kept, kept_weights, plan, again)


def _forward_turn(spec: ExpertSpec, received: _Received, turn: Any, w: _Weights):
    """Weighted sums (r, d) over the rows of this turn, and gate_up."""
    into, down = spec.into, spec.down
    rows = _rows_of_turn(spec, received, turn)
    gate_up = _gate_up(spec, received, rows, w.gate_up)
    h_args = quantize_args(down, down.recipe.fwd)
    h, _ = swiglu_quantize(gate_up, *rows.groups, with_columns=False, **h_args)
    out = gemm_as(down, down.out_dtype, h, w.down, *rows.groups)
    sums = sum_of_rows(out, rows.order, received.weights, rows.has_row)
    return sums.astype(into.lhs_dtype), gate_up


def _gate_up(spec: ExpertSpec, received: _Received, rows: _Turn, w: ScaledArray) -> jax.Array:
    lhs = _copy(received.tokens, rows.token)
    return gemm_as(spec.into, spec.into.out_dtype, lhs, w, *rows.groups)


def _backward(spec: ExpertSpec, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
    received, gate_up, w, plan, sent = residuals
    exchange = spec.exchange
    quantised = quantize(dout, **_travel_args(spec.down, spec.down.recipe.bwd))

    def run(turn: Any, received: _Received, gate_up: jax.Array | None) -> tuple[Any, ...]:
        send = lambda x: exchange.send(plan, turn, x)
        douts = ScaledArray(send(quantised.values), send(quantised.scale))
        first = _backward_turn(spec, received, douts, 0, w, gate_up)
        step = lambda turn: _backward_turn(spec, received, douts, turn, w, None)
        dx, dweights, *drhs = _add_turns(first, _num_turns(spec, received), step)
        give_back = lambda x: exchange.give_back(plan, turn, x)
        return give_back(dx), give_back(dweights), *drhs

    first = run(0, received, gate_up)
    step = lambda turn: run(turn, _receive(spec, plan, turn, *sent), None)
    dx, dweights, *drhs = _add_turns(first, exchange.num_turns(plan), step)
    return dx.astype(spec.into.lhs_dtype), dweights.astype(received.weights.dtype), *drhs, None


def _backward_turn(
    spec: ExpertSpec, received: _Received, douts: ScaledArray, turn: Any, w: _Weights, gate_up: Any
) -> tuple[Any, ...]:
    """Of the rows of this turn: dx (r, d), dweights (r, top_k), dw_gate_up and dw_down."""
    into, down = spec.into, spec.down
    rows = _rows_of_turn(spec, received, turn)
    if gate_up is None:
        # NOTE: behind a barrier with the turn, or XLA would transpose before and without need.
        w_gate_up, _ = lax.optimization_barrier((w.gate_up, turn))
        gate_up = _gate_up(spec, received, rows, w_gate_up.T)
    douts = _copy(douts, rows.token)
    with jax.named_scope("dlhs"):
        dh = gemm_as(down, down.lhs_dtype, douts, w.down, *rows.groups).astype(jnp.float32)
    dots = jnp.sum(swiglu(gate_up) * dh, axis=1)
    dweights = jnp.where(rows.has_row, take_rows(dots, rows.order), 0)
    weights = take_rows(received.weights.reshape(-1), rows.choice).astype(jnp.float32)[:, None]
    dh = (dh * weights).astype(gate_up.dtype)
    fwd_args, bwd_args = (quantize_args(into, fmt) for fmt in (into.recipe.fwd, into.recipe.bwd))
    da, da_columns = swiglu_grad_quantize(gate_up, dh, *rows.groups, with_columns=True, **bwd_args)
    with jax.named_scope("dlhs"):
        dx = gemm_as(into, into.lhs_dtype, da, w.gate_up, *rows.groups)
    dx = sum_of_rows(dx, rows.order, None, rows.has_row).astype(dx.dtype)
    dw_gate_up = dw_down = None
    columns = partial(_columns, into.out_dtype, rows.groups)
    if into.rhs_dtype is not None:
        x_columns = columns(_copy(received.tokens, rows.token), 1, fwd_args)
        with jax.named_scope("drhs"):
            dw_gate_up = wgrad_as(into, into.rhs_dtype, x_columns, da_columns, rows.groups[0])
    if down.rhs_dtype is not None:
        _, h_columns = swiglu_quantize(gate_up, *rows.groups, with_columns=True, **fwd_args)
        dout_columns = columns(douts, weights, bwd_args)
        with jax.named_scope("drhs"):
            dw_down = wgrad_as(down, down.rhs_dtype, h_columns, dout_columns, rows.groups[0])
    return dx, dweights, dw_gate_up, dw_down


expert_mlp.defvjp(_forward, _backward)


def _travel_args(spec: MatmulSpec, fmt: Any) -> dict[str, Any]:
    return quantize_args(spec, fmt) | dict(pow2_scale=True)


def _receive(spec: ExpertSpec, plan: Any, turn: Any, tokens, weights, indices) -> _Received:
    send = partial(spec.exchange.send, plan, turn)
    local = send(indices, empty=-1) - lax.axis_index(spec.exchange.axis) * spec.experts
    tokens = ScaledArray(send(tokens.values), send(tokens.scale))
    return _Received(tokens, send(weights), *sort_choices(local, spec.experts))


def _num_turns(spec: ExpertSpec, received: _Received) -> jax.Array | int:
    """Turns until all rows are computed."""
    return 1 if spec.has_one_turn else -(-received.sizes.sum() // spec.rows)


def _rows_of_turn(spec: ExpertSpec, received: _Received, turn: Any) -> _Turn:
    first = turn * spec.rows
    ends = jnp.clip(jnp.cumsum(received.sizes) - first, 0, spec.rows)
    sizes = jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))
    choice = jnp.pad(received.choice, (0, -received.choice.shape[0] % spec.rows))
    choice = lax.dynamic_slice_in_dim(choice, first, spec.rows)
    order = received.order - first
    has_row = (order >= 0) & (order < ends[-1])
    groups = sizes, jnp.zeros((1,), jnp.int32)
    token = choice // received.order.shape[1]
    return _Turn(groups, choice, token, jnp.where(has_row, order, 0), has_row)


def _copy(tokens: ScaledArray, rows: jax.Array) -> ScaledArray:
    return ScaledArray(take_rows(tokens.values, rows), take_rows(tokens.scale, rows))


def _columns(dtype: Any, groups: Any, rows: ScaledArray, weights: Any, args) -> ScaledArray:
    """Weighted rows, quantised again along their ragged columns."""
    x = rows.values.astype(jnp.float32) * spread_scale(rows) * weights
    return ragged_columns(x.astype(dtype), *groups, **args)


def _add_turns(first: Any, count: jax.Array | int, step: Callable[[jax.Array], Any]) -> Any:
    """first + step(1) + ... + step(count - 1)."""
    if isinstance(count, int):
        return first

    def add(state):
        turn, total = state
        return turn + 1, jax.tree.map(jnp.add, total, step(turn))

    return lax.while_loop(lambda state: state[0] < count, add, (jnp.int32(1), first))[1]
