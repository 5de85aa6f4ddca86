"""The scores and weights of a router, with or without specified bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_fp8gemm._data import checks
from jax_fp8gemm.moe import _scoring, _specified_scoring
from jax_fp8gemm.moe._routing import Routing
from jax_fp8gemm.moe._scoring import Scoring
from jax_fp8gemm.moe._wide import MAX_TERMS


def check_num_scores(op: str, logits: Any) -> None:
    """Raises NotImplementedError if there are more experts than specified sums take."""
    if logits.shape[-1] > MAX_TERMS:
        raise NotImplementedError(
            f"{op}: batch_invariant must go with up to {MAX_TERMS} experts; "
            f"got logits {checks.short_type(logits)}"
        )


def score_all(logits: jax.Array, scoring: Scoring, batch_invariant: bool) -> jax.Array:
    """Returns the scores of all experts, without a scale, of f32 logits (..., num_experts)."""
    if batch_invariant:
        return _specified_scoring.scores(logits, scoring, False, 1.0)
    return _scoring.scores(logits, scoring)


def weights_of(
    routing: Routing,
    choose: Callable[[jax.Array], jax.Array],
    logits: jax.Array,
    *,
    batch_invariant: bool,
) -> jax.Array:
    """Returns the weights (..., top_k) of f32 logits (..., num_experts).

    choose: picks what belongs to the chosen experts from (..., num_experts).
    """
    scoring, normalize, scale = routing.scoring, routing.normalize, routing.scale
    if batch_invariant:
        if scoring == "softmax" and not normalize:
            return choose(_specified_scoring.scores(logits, scoring, False, scale))
        return _specified_scoring.scores(choose(logits), scoring, normalize, scale)
    chosen = choose(logits)
    if normalize:
        weights = _scoring.normalized_scores(chosen, scoring)
    else:
        weights = _scoring.scores(chosen, scoring, among=logits)
    return weights if scale == 1 else weights * scale
