"""Balance: losses and the bias that keep the load of experts even."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._sharding.manual_axes import replicate
from jax_fp8gemm.moe._scoring import Scoring, check_scoring, normalized_scores

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int


def load_balancing_loss(
    logits: Float[Array, "*batch num_experts"],
    load: Int[Array, " num_experts"],
    *,
    scoring: Scoring = "softmax",
) -> Float32[Array, ""]:
    """Returns num_experts * sum over experts of f_i P_i, which is 1 if all are chosen alike.

    f_i is the share of expert i in all choices: load_i / sum(load). P_i is the mean over the tokens
    of its score, divided by the token's scores of all experts: with "softmax", of its probability.
    The loss has a gradient through P alone.

    This is the loss of Switch Transformers (Fedus et al., equations 4 to 6) for any top_k, and
    DeepSeek-V3's L_Bal without its factor alpha (report, section 2.1.2). Transformers' Mixtral
    divides the load by the tokens instead of the choices: its loss is top_k times this one.

    DeepSeek-V3 takes it of each sequence. jax.vmap does so, if the load is vmapped too:
    `jax.vmap(load_balancing_loss)(logits, load).mean()`. In a shard_map it is the loss of the
    device's tokens; with the load summed by jax.lax.psum, the mean over the devices is the loss of
    all tokens.

    Args:
      logits: (..., num_experts) bf16, f16 or f32, without the bias. All is computed in f32.
      load: (num_experts,) integers, as route and moe_layer return it with return_load.
      scoring: as for route.
    Returns:
      f32 scalar; 0 if there are no tokens or no choices.
    Raises:
      TypeError: a dtype is wrong.
      ValueError: a shape or scoring is wrong.
    """
    op = "load_balancing_loss"
    logits = _as_logits(op, logits)
    check_scoring(op, scoring)
    load = _as_load(op, load, (logits.shape[-1],), "logits", logits)
    share = load.astype(jnp.float32) / jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)
    mean = _mean_of_tokens(normalized_scores(logits, scoring), logits.shape[:-1])
    return logits.shape[-1] * jnp.sum(share * mean)


def z_loss(logits: Float[Array, "*batch num_experts"]) -> Float32[Array, ""]:
    """Returns the mean over the tokens of log(sum over experts of exp(logits))^2.

    It keeps the logits small (ST-MoE: Zoph et al., equation 5).

    Args:
      logits: (..., num_experts) bf16, f16 or f32. All is computed in f32.
    Returns:
      f32 scalar; 0 if there are no tokens.
    Raises:
      TypeError: a dtype is wrong.
      ValueError: a shape is wrong.
    """
    logits = _as_logits("z_loss", logits)
    return _mean_of_tokens(jax.nn.logsumexp(logits, axis=-1) ** 2, logits.shape[:-1])


def update_balance_bias(
    bias: Float[Array, "*layers num_experts"],
    load: Int[Array, "*layers num_experts"],
    rate: float | Float[Array, ""],
) -> Float[Array, "*layers num_experts"]:
    """Returns `bias` + rate where an expert has less than the mean load, - rate where it has more.

    An expert of exactly the mean load keeps its bias. Call it after each step, with the load of the
    step's whole batch (DeepSeek-V3's report, section 2.1.2, where the rate is gamma: 0.001, and 0
    for the last 500 B tokens).

    Args:
      bias: (..., num_experts) bf16, f16 or f32. Leading dimensions are layers, each by itself.
      load: (..., num_experts) integers, whose sum over the experts must be below 2^31.
      rate: a number, or a scalar array of floats.
    Returns:
      An array like `bias`, without a gradient.
    Raises:
      TypeError: a dtype or rate is wrong.
      ValueError: a shape is wrong.
    """
    op = "update_balance_bias"
    bias = _as_logits(op, bias, "bias", cast=False)
    load = _as_load(op, load, bias.shape, "bias", bias)
    rate = _as_rate(op, rate).astype(bias.dtype)
    # In integers, because f32 does not hold every count: the mean is `whole` and a fraction.
    total = jnp.sum(load, axis=-1, keepdims=True)
    load = load.astype(total.dtype)
    whole, rest = total // bias.shape[-1], total % bias.shape[-1]
    is_below = (load < whole) | ((load == whole) & (rest > 0))
    step = is_below.astype(bias.dtype) - (load > whole).astype(bias.dtype)
    return jax.lax.stop_gradient(bias + rate * step)


def _as_logits(op: str, x: Any, name: str = "logits", *, cast: bool = True) -> jax.Array:
    """Returns x (..., num_experts) with all experts on each device, as f32 if `cast`."""
    x = arrays.as_array(x)
    checks.check_array(op, name, x)
    checks.check_dtype(op, name, x, formats.FLOAT_DTYPES)
    checks.check_min_ndim(op, name, x, 1, "(..., num_experts)")
    if x.shape[-1] == 0:
        got = checks.short_type(x)
        raise ValueError(f"{op}: {name} must be of at least one expert; got {name} {got}")
    x = replicate(op, jnp.asarray(x), from_dim=x.ndim - 1)
    return x.astype(jnp.float32) if cast else x


def _as_load(op: str, load: Any, shape: tuple[int, ...], name: str, like: Any) -> jax.Array:
    load = arrays.as_array(load)
    checks.check_array(op, "load", load)
    checks.check_integers(op, "load", load)
    if load.shape != shape:
        raise ValueError(
            f"{op}: load must have a count for each expert of {name} {checks.short_type(like)}; "
            f"got load {checks.short_type(load)}"
        )
    return replicate(op, jnp.asarray(load), from_dim=load.ndim - 1)


def _as_rate(op: str, rate: Any) -> jax.Array:
    rate = arrays.as_array(rate.item() if isinstance(rate, np.generic) else rate)
    if arrays.is_array(rate):
        checks.check_dtype(op, "rate", rate, formats.FLOAT_DTYPES)
        checks.check_ndim(op, "rate", rate, 0, "a scalar")
    elif not isinstance(rate, numbers.Real) or isinstance(rate, bool):
        raise TypeError(f"{op}: rate must be a number; got {checks.short_repr(rate)}")
    return jnp.asarray(rate, None if arrays.is_array(rate) else jnp.float32)


def _mean_of_tokens(x: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    """Returns the mean of x (*tokens, ...) over the tokens; 0 if there are none."""
    return jnp.sum(x, axis=tuple(range(len(tokens)))) / max(math.prod(tokens), 1)
