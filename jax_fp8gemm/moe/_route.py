"""route: the experts of each token, and their weights, from router logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.kept_rounding import add_flushed, exact_f32
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._sharding.manual_axes import replicate
from jax_fp8gemm.moe._choices import count_choices
from jax_fp8gemm.moe._routing import RouteOptions, Routing, as_top_k, check_bias, check_types, fit
from jax_fp8gemm.moe._scoring import Scoring
from jax_fp8gemm.moe._weights import check_num_scores, score_all, weights_of

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


@overload
def route(
    logits: Array, top_k: int, *, return_load: Literal[False] = ..., **how: Unpack[RouteOptions]
) -> tuple[Array, Array]: ...


@overload
def route(
    logits: Array, top_k: int, *, return_load: Literal[True], **how: Unpack[RouteOptions]
) -> tuple[Array, Array, Array]: ...


def route(
    logits: Float[Array, "*batch num_experts"],
    top_k: int,
    *,
    return_load: bool = False,
    scoring: Scoring = "softmax",
    batch_invariant: bool = False,
    normalize: bool = True,
    bias: Float[Array, " num_experts"] | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    scale: float = 1.0,
) -> (
    tuple[Int32[Array, "*batch top_k"], Float32[Array, "*batch top_k"]]
    | tuple[
        Int32[Array, "*batch top_k"], Float32[Array, "*batch top_k"], Int32[Array, " num_experts"]
    ]
):
    """Chooses the experts of the top_k largest logits of each token; of equal logits, the first.

    docs/routing.md says which arguments give the routers of published models.

    Args:
      logits: (..., num_experts) bf16, f16 or f32. All is computed in f32.
      top_k: 1..num_experts.
      return_load: whether to return the load too.
      scoring: what makes the score of an expert of its logit x. "softmax" is over all experts,
        "sigmoid" (DeepSeek-V3) and "sqrtsoftplus", sqrt(log(1 + exp(x))) (DeepSeek-V4), are of
        each logit.
      batch_invariant: whether the choices and the weights of a token, and their gradients, have
        bits that depend on its logits alone: not on the other tokens, on the program around, or on
        the machine (docs/numerics.md). It costs 400 to 1100 integer operations for each score.
        Weights below 2^-126 are 0. They are then differentiable once, in reverse mode.
      normalize: whether to divide the scores of the chosen experts by their sum. A softmax is then
        one over the chosen logits. The ratio is that of the exact scores, even if all of them
        underflow; DeepSeek's code adds 1e-20 to the sum, which f32 shows only below 1e-12.
      bias: (num_experts,) bf16, f16 or f32. It is added to the scores, and the largest sums are
        chosen in the place of the largest logits. It is not in the weights, and has no gradient:
        balance without an auxiliary loss (DeepSeek-V3's report, section 2.1.2).
      n_group, topk_group: the experts form n_group groups of neighbours. Only those of the
        topk_group best groups are chosen. A group is as good as the sum of its two largest scores,
        with their bias; of equal groups the first is better. (DeepSeek-V3's code, inference/
        model.py.)
      scale: a number above 0, by which all weights are multiplied.
    Returns:
      indices (..., top_k) int32, the best choice first, and weights (..., top_k) f32, the scores of
      these experts. The weights are differentiable in logits. With return_load also the load,
      (num_experts,) int32: how many choices name each expert.
    Raises:
      TypeError: a dtype or the kind of an argument.
      ValueError: rank, top_k, scoring, the shape of
      bias, scale, and groups that do not divide the experts or hold too few of them.
      NotImplementedError: batch_invariant with more than 32768 experts, or another derivative.
    """
    op = "route"
    logits = arrays.as_array(logits)
    checks.check_array(op, "logits", logits)
    checks.check_dtype(op, "logits", logits, formats.FLOAT_DTYPES)
    checks.check_min_ndim(op, "logits", logits, 1, "(..., num_experts)")
    routing = Routing(scoring, normalize, n_group, topk_group, scale)
    checks.check_static(op, top_k=top_k)
    checks.check_bool(op, return_load=return_load, batch_invariant=batch_invariant)
    check_types(op, routing)
    top_k = as_top_k(op, top_k, logits)
    routing = fit(op, routing, top_k, logits)
    bias = check_bias(op, bias, logits.shape[-1])
    indices, weights = choose_experts(op, top_k, routing, logits, bias, batch_invariant)
    if not return_load:
        return indices, weights
    return indices, weights, count_choices(indices, logits.shape[-1])


def choose_experts(
    op: str,
    top_k: int,
    routing: Routing,
    logits: jax.Array,
    bias: jax.Array | None,
    batch_invariant: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the indices and the weights of route, for arguments that are checked."""
    logits = replicate(op, jnp.asarray(logits))
    if bias is not None:
        bias = replicate(op, jnp.asarray(bias)).astype(jnp.float32)
    if batch_invariant:
        check_num_scores(op, logits)
        logits = exact_f32(logits)
    logits = logits.astype(jnp.float32)
    stopped = lax.stop_gradient(logits), lax.stop_gradient(bias)
    _, indices = lax.top_k(_ranks(routing, *stopped, batch_invariant), top_k)
    # The transpose of a gather would be a scatter-add.
    experts = lax.broadcasted_iota(indices.dtype, (*indices.shape, logits.shape[-1]), indices.ndim)
    is_chosen = indices[..., None] == experts
    choose = lambda x: jnp.sum(jnp.where(is_chosen, x[..., None, :], 0), axis=-1)
    weigh = partial(weights_of, routing, choose, batch_invariant=batch_invariant)
    return indices, reverse_mode(op, weigh, logits) if batch_invariant else weigh(logits)


def _ranks(
    routing: Routing, logits: jax.Array, bias: jax.Array | None, batch_invariant: bool
) -> jax.Array:
    """Returns numbers (..., num_experts) that are largest for the experts to choose."""
    score = partial(score_all, scoring=routing.scoring, batch_invariant=batch_invariant)
    add = add_flushed if batch_invariant else jnp.add
    # Without a bias the logits themselves: scores may be equal in f32 where logits are not.
    ranks = biased = logits
    if bias is not None:
        ranks = biased = add(score(logits), bias.reshape(_last(logits)))
    n_group = routing.n_group
    if n_group is None or n_group == 1 or routing.topk_group is None:
        return _without_negative_zeros(ranks)
    if bias is None:
        biased = score(logits)
    groups = lambda x: x.reshape(*x.shape[:-1], n_group, x.shape[-1] // n_group)
    best_two, _ = lax.top_k(groups(biased), 2)
    of_group = add(best_two[..., 0], best_two[..., 1])
    _, best = lax.top_k(_without_negative_zeros(of_group), routing.topk_group)
    numbers = lax.broadcasted_iota(best.dtype, (*best.shape, n_group), best.ndim)
    is_kept = jnp.any(best[..., None] == numbers, axis=-2)
    # An expert of another group comes after all others, even if the rank of those is -inf.
    kept = jnp.maximum(groups(_without_negative_zeros(ranks)), jnp.finfo(jnp.float32).min)
    return jnp.where(is_kept[..., None], kept, -jnp.inf).reshape(logits.shape)


def _last(x: jax.Array) -> tuple[int, ...]:
    """Returns the shape in which an array along the last dimension of x has the rank of x."""
    return (*(1,) * (x.ndim - 1), x.shape[-1])


def _without_negative_zeros(x: jax.Array) -> jax.Array:
    """Returns x (f32) with 0.0 in the place of -0.0, which equals it but is less to lax.top_k."""
    # By bits: a comparison may take subnormal numbers for zeros.
    is_negative_zero = lax.bitcast_convert_type(x, jnp.int32) == jnp.iinfo(jnp.int32).min
    return jnp.where(is_negative_zero, 0.0, x)
