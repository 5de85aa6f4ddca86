"""The block of a MoEConfig as functions of its parameters: router, experts and shared experts.

The modules jax_fp8gemm.nnx.MoE and jax_fp8gemm.linen.MoE are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.formats import FLOAT_DTYPES
from jax_fp8gemm._data.kept_rounding import add_rounded, exact_f32, rounded
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import check_unquantised
from jax_fp8gemm._ops.matmul import matmul
from jax_fp8gemm._ops.product_spec import check_recipe
from jax_fp8gemm.moe._gated_mlp import gated_mlp
from jax_fp8gemm.moe._moe_layer import moe_layer
from jax_fp8gemm.moe._route import route
from jax_fp8gemm.moe._run_arguments import RunArguments, check_run_arguments
from jax_fp8gemm.moe.configs import MoEConfig

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

Initializer = Callable[..., jax.Array]  # (key, shape, dtype), as those of jax.nn.initializers
_IN_INTEGERS = Recipe(fwd=None, batch_invariant=True)
# These are f32 whatever the dtype of the others.
ROUTER_PARAMETERS = ("router", "router_bias", "balance_bias")


def parameter_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of the block, by its name.

    router (d, num_experts) and router_bias (num_experts,) make the logits. balance_bias
    (num_experts,) is added where experts are chosen, and no gradient trains it. w_gate_up
    (num_experts, d, 2 f) and w_down (num_experts, f, d) are the experts, b_gate_up (num_experts, 2
    f) and b_down (num_experts, d) their biases. shared_gate_up (d, 2 s f) and shared_down (s f, d)
    are the s shared experts, as one MLP.

    Raises:
      TypeError: config is no MoEConfig.
    """
    _check_config(config)
    d, f, g = config.hidden, config.intermediate, config.num_experts
    shared_f = config.num_shared_experts * f
    shapes: dict[str, tuple[int, ...]] = {"router": (d, g)}
    if config.has_router_bias:
        shapes |= {"router_bias": (g,)}
    if config.has_balance_bias:
        shapes |= {"balance_bias": (g,)}
    shapes |= {"w_gate_up": (g, d, 2 * f), "w_down": (g, f, d)}
    if config.has_expert_biases:
        shapes |= {"b_gate_up": (g, 2 * f), "b_down": (g, d)}
    if shared_f:
        shapes |= {"shared_gate_up": (d, 2 * shared_f), "shared_down": (shared_f, d)}
    return shapes


def initial_parameter(
    key: jax.Array, name: str, shape: tuple[int, ...], dtype: Any, kernel_init: Initializer
) -> jax.Array:
    """Returns the parameter `name` before training. Biases are zero.

    kernel_init makes matrices, those of experts one by one. Those of the router are f32.
    """
    dtype = jnp.float32 if name in ROUTER_PARAMETERS else dtype
    if name.endswith("bias") or name.startswith("b_"):
        return jnp.zeros(shape, dtype)
    if len(shape) == 2:
        return kernel_init(key, shape, dtype)
    keys = jax.random.split(key, shape[0])
    return jax.vmap(lambda key: kernel_init(key, shape[1:], dtype))(keys)


def check_dtypes(op: str, dtype: Any, param_dtype: Any) -> None:
    """Raises TypeError unless a module can have these dtypes; `dtype` may be None."""
    checks.check_out_dtype(op, "param_dtype", param_dtype, FLOAT_DTYPES)
    if dtype is not None:
        checks.check_out_dtype(op, "dtype", dtype, FLOAT_DTYPES)


def cast_tokens(x: Any, dtype: Any) -> Any:
    """Returns x in `dtype`, or as it is for None. What is no array stays as it is, for errors."""
    x = arrays.as_array(x)
    return x if dtype is None or not arrays.is_array(x) else x.astype(dtype)


def apply_block(
    config: MoEConfig,
    parameters: Mapping[str, Any],
    x: Float[Array, "*batch d"],
    *,
    return_load: bool = False,
    **options: Unpack[RunArguments],
) -> Float[Array, "*batch d"] | tuple[Float[Array, "*batch d"], Int32[Array, " num_experts"]]:
    """Returns what the block makes of the tokens.

    Args:
      config: sizes, router and activation.
      parameters: those of parameter_shapes. The matrices of experts and of shared experts may be
        ScaledArrays or, in training, QuantizedWeights.
      x: (..., d) bf16, f16 or f32, d = config.hidden: the tokens.
      return_load: whether to return the load too, as moe_layer does.
      options: of moe_layer: recipe, implementation, gate_up_pieces, expert_axis, exchange, parts,
        capacity_factor, mesh.
    Returns:
      (..., d) array of the dtype of x; with return_load also the load, (num_experts,) int32.
    Raises:
      TypeError: config is no MoEConfig, or options has another name. ValueError: d is not
        config.hidden, or parameters has other names. Others as moe_layer.
    """
    _check_config(config)
    check_run_arguments("moe.block", options)
    x = _checked_tokens(config, x)
    _check_names(config, parameters)
    is_invariant = check_recipe("moe.block", options.get("recipe", DEEPSEEK_V3)).batch_invariant
    logits = _logits(parameters, x, is_invariant)
    experts = parameters["w_gate_up"], parameters["w_down"]
    shared = None
    if config.num_shared_experts:
        shared = parameters["shared_gate_up"], parameters["shared_down"]
    how: dict[str, Any] = dict(activation=config.activation, return_load=return_load, **options)
    if config.has_expert_biases:
        how |= dict(biases=(parameters["b_gate_up"], parameters["b_down"]))
    if config.weighs_tokens:
        return _weighing_tokens(config, x, logits, experts, shared, how, is_invariant)
    bias = parameters.get("balance_bias")
    return moe_layer(x, logits, *experts, bias=bias, shared_expert=shared, **config.routing, **how)


def _check_config(config: object) -> None:
    if not isinstance(config, MoEConfig):
        raise TypeError(
            "moe.block: config must be a moe.configs.MoEConfig; got "
            f"{checks.short_repr(config)}. moe.configs has those of models, such as MIXTRAL_8X7B."
        )


def _checked_tokens(config: MoEConfig, x: Any) -> jax.Array:
    """Returns the tokens as an array; raises unless they are (..., hidden)."""
    x = arrays.as_array(x)
    check_unquantised("moe.block", "x", x)
    if x.ndim < 1 or x.shape[-1] != config.hidden:
        raise ValueError(
            f"moe.block: x must be (..., d) with d = {config.hidden}, the hidden of the config; "
            f"got x {checks.short_type(x)}"
        )
    return x


def _check_names(config: MoEConfig, parameters: Mapping[str, Any]) -> None:
    """Raises ValueError unless the parameters are named as those of the config."""
    expected = parameter_shapes(config)
    if parameters.keys() != expected.keys():
        raise ValueError(
            f"moe.block: parameters must be {', '.join(expected)}, as moe.block.parameter_shapes "
            f"of the config says; got {', '.join(parameters) or 'none'}"
        )


def _logits(parameters: Mapping[str, Any], x: jax.Array, is_invariant: bool) -> jax.Array:
    router = jnp.asarray(parameters["router"], jnp.float32)
    if is_invariant:
        logits = matmul(x, router, recipe=_IN_INTEGERS, preferred_element_type=jnp.float32)
    else:
        logits = jnp.matmul(x.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)
    if "router_bias" in parameters:
        logits += parameters["router_bias"].reshape((1,) * (x.ndim - 1) + (-1,))
    return logits


def _weighing_tokens(
    config: MoEConfig,
    x: jax.Array,
    logits: jax.Array,
    experts: Any,
    shared: Any,
    how: Any,
    is_invariant: bool,
) -> Any:
    """Runs each expert on weight * token. There is one choice for each token."""
    if config.top_k != 1:
        raise ValueError(
            f"moe.block: a MoEConfig with weighs_tokens must have top_k 1; got {config.top_k}"
        )
    indices, weights = route(logits, **config.routing, batch_invariant=is_invariant)
    router = indices, jnp.ones_like(weights)
    if is_invariant:
        weighed = rounded(exact_f32(x) * weights, x.dtype)
    else:
        weighed = (x * weights).astype(x.dtype)
    out = moe_layer(weighed, router, *experts, **how)
    if shared is None:
        return out
    of_mlp = ("activation", "recipe", "implementation", "gate_up_pieces")
    sharding = jax.typeof(out[0] if isinstance(out, tuple) else out).sharding
    if sharding.mesh.explicit_axes:
        x = jax.sharding.reshard(x, sharding)
    added = gated_mlp(x, *shared, **{name: how[name] for name in of_mlp if name in how})
    add = add_rounded if is_invariant else jnp.add
    return (add(out[0], added), out[1]) if isinstance(out, tuple) else add(out, added)
