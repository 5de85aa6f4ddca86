"""expert_mlp: the experts of an expert-parallel layer, on tokens that travel as FP8.

It runs on each device of the expert axis, inside a shard_map. Brackets hold scale blocks.

    x        [1x128, power-of-two scales]  is sent to the devices of the token's experts
    rows     [as x]  are copies of the received tokens, one for each choice of a local expert
    partial  is the weighted sum of a token's rows after the experts, in the dtype of x; it is sent
             back, and added to those of the other devices

    dout     [1x128, power-of-two scales]  is sent as x was
    dx       is summed over the local experts, in the dtype of x; it is sent back and added

If the recipe has fp8_combine, partial and dx are quantised before they are sent back, as x and dout
are. The scales of what travels are powers of two in every recipe (DeepSeek-V3 report, section
3.3.3): weight gradients read x and dout in other blocks, and quantising them again then changes
hardly any value. The products are those of moe/_mlp_products.py.

A device divides its tokens into parts, which travel and are computed one after another (parts.py).

No token is dropped, so the number of rows is not known before. Two loops take turns:
  - An exchange with fewer slots than tokens sends the rest in further turns.
  - The received rows are computed `rows` at a time. Evenly spread choices fill one such turn at
    most, and this bounds the memory.
Where nothing is differentiated, results are computed in strips of columns, and each strip travels
back while the next one is computed. A strip has the bits that it has in the whole.

What turns contribute to a token or to a weight is added in the dtype of the sum; that is f32 for a
weight if there are several parts. gate_up of the first turn is kept for the backward pass. That of
further turns is computed again, and so are the columns of h, from gate_up. With kept_gate_up="fp8"
gate_up is then rounded as what is kept is, and the columns of h are not kept. In all turns they are
made of rounded values, so the gradient of a row does not depend on its turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._ops.product_spec import name_residual
from jax_fp8gemm.moe._biases import as_biases
from jax_fp8gemm.moe._kept_gate_up import keep
from jax_fp8gemm.moe._mlp_products import (
    Experts,
    Residuals,
    transposed_weights,
    weights_both_ways,
)
from jax_fp8gemm.moe._operands import Operands
from jax_fp8gemm.moe._parallel.exchange_kinds import Plan
from jax_fp8gemm.moe._parallel.expert_spec import ExpertSpec, PartSpec
from jax_fp8gemm.moe._parallel.mlp_backward import backward
from jax_fp8gemm.moe._parallel.part import (
    Kept,
    KeptPart,
    Sent,
    give_back,
    quantize_to_send,
    receive,
    results,
    send_tokens,
)
from jax_fp8gemm.moe._parallel.parts import after, at_the_end, divide, in_order, join
from jax_fp8gemm.moe._parallel.rows import add_turns


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_mlp(spec: ExpertSpec, operands: Operands) -> jax.Array:
    """Returns the weighted sum (t, d) of the results of each token's experts.

    operands: the tokens and the experts of this device. Experts are numbered along the axis.
    """
    x, indices, weights, w_gate_up, w_down, biases = operands
    transposed = transposed_weights(spec.products, w_gate_up, w_down, biases)
    return forward(spec, x, indices, weights, transposed, is_differentiated=False)[0]


def _expert_mlp_fwd(spec: ExpertSpec, operands: Operands) -> tuple[jax.Array, tuple[Kept, Experts]]:
    x, indices, weights, w_gate_up, w_down, biases = operands
    w, transposed = weights_both_ways(spec.products, w_gate_up, w_down, biases)
    out, kept = forward(spec, x, indices, weights, transposed, is_differentiated=True)
    return out, (kept, w)


def _expert_mlp_bwd(
    spec: ExpertSpec, residuals: tuple[Kept, Experts], dout: jax.Array
) -> tuple[Operands]:
    kept, w = residuals
    gradients = backward(spec, kept, w, dout)
    biases = as_biases(gradients.biases, w.biases)
    weights = spec.products.gradients_of_weights(gradients.w_gate_up, gradients.w_down)
    return (Operands._make((gradients.x, None, gradients.weights, *weights, biases)),)


expert_mlp.defvjp(_expert_mlp_fwd, _expert_mlp_bwd)


def _keeps_columns(spec: ExpertSpec) -> bool:
    """Returns whether the columns of h are kept of the first turn of rows."""
    has_gradient = spec.products.down.rhs_dtype is not None
    return has_gradient and spec.products.down.recipe.kept_gate_up == "unquantised"


def forward(
    spec: ExpertSpec,
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    w: Experts,
    *,
    is_differentiated: bool,
) -> tuple[jax.Array, Kept]:
    """Returns the result of expert_mlp, by transposed weights, and what `backward` needs, if any.

    is_differentiated: whether there is a backward pass.
    """
    fmt = spec.products.into.recipe.fwd
    with_columns = is_differentiated and _keeps_columns(spec)
    sent = divide(Sent(quantize_to_send(spec, fmt, x), indices, weights), spec.part_sizes)
    plans = [
        part.exchange.plan(tokens.indices // spec.num_local_experts)
        for part, tokens in zip(spec.parts, sent, strict=True)
    ]

    def arrive(i: int, *earlier: Any) -> Sent:
        return send_tokens(spec.parts[i], plans[i], 0, after(sent[i], earlier))

    outs, kept, sums = [], [], ()
    for i, part, arrived in in_order(spec.parts, arrive):
        received = receive(spec, part, after(arrived, sums))
        # Further turns add to what comes back.
        dtype = x.dtype if part.exchange.has_one_turn else jnp.float32
        back = partial(give_back, spec, part, plans[i], 0, fmt, dtype=dtype)
        # What a backward pass sends may travel beside the products of a forward pass.
        how = dict(with_columns=with_columns, keeps_gate_up=is_differentiated)
        how |= dict(in_strips=not is_differentiated)
        out, found = results(spec, part, received, w, back, **how)
        sums, gate_up, h_columns = found
        outs.append(out)
        if gate_up is None:
            continue
        again = None if part.exchange.has_one_turn else name_residual("lhs", sent[i])
        received = name_residual("lhs", received)
        if not with_columns:
            gate_up = name_residual("out", keep(spec.products.into, gate_up))
        residuals = Residuals(name_residual("lhs", h_columns), gate_up)
        kept.append(KeptPart(received, residuals, plans[i], again))

    def run_later(part: PartSpec, plan: Plan, sent: Sent, turn: jax.Array) -> jax.Array:
        received = receive(spec, part, send_tokens(part, plan, turn, sent))
        back = partial(give_back, spec, part, plan, turn, fmt)
        return results(spec, part, received, w, back)[0]

    operands = zip(spec.parts, plans, sent, at_the_end(spec.parts, outs), strict=True)
    outs = [
        add_turns(out, part.exchange.num_turns(plan), partial(run_later, part, plan, sent))
        for part, plan, sent, out in operands
    ]
    return name_residual("out", join(outs).astype(x.dtype)), Kept(tuple(kept))
