"""route: the experts of each token, and their weights, from router logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._sharding.manual_axes import replicate

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32

Scoring = Literal["softmax", "sigmoid"]


def route(
    logits: Float[Array, "m num_experts"],
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    normalize: bool = True,
) -> tuple[Int32[Array, "m top_k"], Float32[Array, "m top_k"]]:
    """Chooses the experts of the top_k largest logits of each token; of equal logits, the first.

    Args:
      logits: (m, num_experts) bf16, f16 or f32.
      top_k: 1..num_experts.
      scoring: "softmax" over all experts, or "sigmoid" of each logit (DeepSeek-V3), in f32.
      normalize: whether to divide the scores of the chosen experts by their sum.
    Returns:
      indices (m, top_k) int32, in the order of falling logits, and weights (m, top_k) f32, the
      scores of these experts. The weights are differentiable in logits.
    Raises:
      TypeError: a dtype. ValueError: rank, top_k, scoring.
    """
    op = "route"
    logits = arrays.as_array(logits)
    checks.check_array(op, "logits", logits)
    checks.check_dtype(op, "logits", logits, formats.FLOAT_DTYPES)
    checks.check_ndim(op, "logits", logits, 2, "(m, num_experts)")
    checks.check_static(op, top_k=top_k)
    checks.check_bool(op, normalize=normalize)
    top_k = as_top_k(op, top_k, logits)
    check_scoring(op, scoring)
    logits = replicate(op, jnp.asarray(logits)).astype(jnp.float32)
    _, indices = lax.top_k(_without_negative_zeros(lax.stop_gradient(logits)), top_k)
    # The transpose of a gather would be a scatter-add.
    is_chosen = indices[:, :, None] == jnp.arange(logits.shape[1], dtype=indices.dtype)[None, None]
    chosen = jnp.sum(jnp.where(is_chosen, logits[:, None], 0), axis=2)
    if scoring == "sigmoid":
        # Logarithms, because the sigmoids of a token may all underflow and still have a ratio.
        weights = (
            jax.nn.softmax(jax.nn.log_sigmoid(chosen)) if normalize else jax.nn.sigmoid(chosen)
        )
    elif normalize:
        weights = jax.nn.softmax(chosen)
    else:
        weights = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=1, keepdims=True))
    return indices, weights


def _without_negative_zeros(x: jax.Array) -> jax.Array:
    """Returns x (f32) with 0.0 in the place of -0.0, which equals it but is less to lax.top_k."""
    # By bits: a comparison may take subnormal numbers for zeros.
    is_negative_zero = lax.bitcast_convert_type(x, jnp.int32) == jnp.iinfo(jnp.int32).min
    return jnp.where(is_negative_zero, 0.0, x)


def as_top_k(op: str, top_k: Any, logits: Any) -> int:
    """Returns `top_k` as an int; raises ValueError unless it is 1..num_experts."""
    number = checks.as_index(top_k)
    if number is None or number not in range(1, logits.shape[1] + 1):
        raise ValueError(
            f"{op}: top_k must be 1..num_experts; got {checks.short_repr(top_k)}, "
            f"logits {checks.short_type(logits)}"
        )
    checks.check_count(op, "num_experts", logits.shape[1], logits)
    return number


def check_scoring(op: str, scoring: Any) -> None:
    """Raises ValueError unless `scoring` is a known name."""
    if not isinstance(scoring, str) or scoring not in ("softmax", "sigmoid"):
        raise ValueError(
            f"{op}: scoring must be 'softmax' or 'sigmoid'; got {checks.short_repr(scoring)}"
        )
