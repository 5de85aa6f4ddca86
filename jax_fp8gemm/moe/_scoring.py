"""Scores: what a router makes of its logits."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]

# Below it, log(1 + exp(x)) is exp(x) in f32: the next term of the series is exp(x) / 2 of it.
_EXP_ALONE = -18.0


def check_scoring(op: str, scoring: Any) -> None:
    """Raises ValueError unless `scoring` is a known name."""
    names = get_args(Scoring)
    if not isinstance(scoring, str) or scoring not in names:
        raise ValueError(
            f"{op}: scoring must be {', '.join(map(repr, names[:-1]))} or {names[-1]!r}; "
            f"got {checks.short_repr(scoring)}"
        )


def scores(logits: jax.Array, scoring: Scoring, among: jax.Array | None = None) -> jax.Array:
    """Returns the scores (..., k) of f32 logits (..., k).

    among: the logits (..., num_experts) that a softmax is over, if they are not `logits`.
    """
    if scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    if scoring == "softmax":
        among = logits if among is None else among
        return jnp.exp(logits - jax.nn.logsumexp(among, axis=-1, keepdims=True))
    # The root of an underflow would have no derivative, nor would an exp that overflows.
    is_exp, other = _split(logits)
    low = jnp.where(is_exp, logits, 0)
    return jnp.where(is_exp, jnp.exp(low / 2), jnp.sqrt(jax.nn.softplus(other)))


def normalized_scores(logits: jax.Array, scoring: Scoring) -> jax.Array:
    """Returns the scores (..., k) of f32 logits (..., k), divided by their sum over k.

    It computes with logarithms, because all scores may underflow and still have a ratio.
    """
    if scoring == "sigmoid":
        logits = jax.nn.log_sigmoid(logits)
    elif scoring == "sqrtsoftplus":
        is_exp, other = _split(logits)
        logits = jnp.where(is_exp, logits, jnp.log(jax.nn.softplus(other))) / 2
    return jax.nn.softmax(logits)


def _split(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where softplus is exp, and the logits with 0 in these places."""
    is_exp = logits < _EXP_ALONE
    return is_exp, jnp.where(is_exp, 0, logits)
