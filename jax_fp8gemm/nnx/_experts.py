"""SwiGLU and MoE: modules of our own in Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.activation import Activation, check_activation
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._ops.product_spec import check_recipe
from jax_fp8gemm.moe import gated_mlp
from jax_fp8gemm.moe.block import (
    Initializer,
    RunArguments,
    apply_block,
    cast_tokens,
    check_dtypes,
    check_run_arguments,
    initial_parameter,
    parameter_shapes,
)
from jax_fp8gemm.moe.configs import MoEConfig
from jax_fp8gemm.nnx._scopes import scoped
from jax_fp8gemm.nnx._weights import Weights

_lecun_normal = jax.nn.initializers.lecun_normal()


class SwiGLU(nnx.Module):
    """A gated MLP: (act(x gate) * (x up)) down, whose activation is fused with its quantisation.

    It computes what two Linear without bias and the activation between them compute, and stores no
    unquantised activation but gate | up.

    Args:
      hidden: d, the features of the input and of the result.
      intermediate: f, the features of gate and of up.
      activation, gate_up_pieces: as for moe.moe_mlp.
      dtype: that of x and of the result. None keeps that of x.
      param_dtype: that of the weights, bf16, f16 or f32.
      kernel_init: initialises both weights.
      recipe, implementation: as for moe.moe_mlp.
      w_gate_up_metadata, w_down_metadata: metadata of the parameters, as Flax's kernel_metadata.
      rngs: its stream `params` is drawn from.
    Attributes:
      w_gate_up: nnx.Param (d, 2 f), gate | up; in pieces if there are several.
      w_down: nnx.Param (f, d).
    Raises:
      TypeError: a dtype or the recipe is wrong. ValueError: activation or implementation is.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: Activation = "silu",
        gate_up_pieces: int = 1,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = _lecun_normal,
        recipe: Recipe | str = DEEPSEEK_V3,
        implementation: Implementation = None,
        w_gate_up_metadata: Mapping[str, Any] = MappingProxyType({}),
        w_down_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        check_recipe("SwiGLU", recipe)
        checks.check_implementation("SwiGLU", implementation)
        check_activation("SwiGLU", activation)
        check_dtypes("SwiGLU", dtype, param_dtype)
        init = lambda *shape: kernel_init(rngs.params(), shape, param_dtype)
        self.w_gate_up = nnx.Param(init(hidden, 2 * intermediate), **w_gate_up_metadata)
        self.w_down = nnx.Param(init(intermediate, hidden), **w_down_metadata)
        self.activation: Activation = activation
        self.gate_up_pieces = gate_up_pieces
        self.dtype = dtype
        self.recipe = recipe
        self.implementation: Implementation = implementation

    @scoped
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the MLP of x (..., d), of the same shape, in `dtype`."""
        return gated_mlp(
            cast_tokens(x, self.dtype),
            self.w_gate_up[...],
            self.w_down[...],
            activation=self.activation,
            gate_up_pieces=self.gate_up_pieces,
            recipe=self.recipe,
            implementation=self.implementation,
        )

    def weights_of_products(self) -> Weights:
        """Returns how the products read the weights, for quantize_weights."""
        how = dict(recipe=self.recipe, implementation=self.implementation)
        return Weights(("w_gate_up", "w_down"), how)


class BalanceBias(nnx.Variable):
    """The bias by which a router chooses experts. It is no parameter: no gradient trains it."""


class MoE(nnx.Module):
    """A mixture of experts: router, experts and shared experts::

        layer = MoE(moe.configs.DEEPSEEK_V3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        y, load = layer(x, return_load=True)
        layer.balance_bias[...] = moe.update_balance_bias(layer.balance_bias[...], load, 1e-3)

    Args:
      config: sizes, router and activation: one of moe.configs, or a MoEConfig of your own.
      dtype: that of x and of the result. None keeps that of x. The router computes in f32.
      param_dtype: that of the experts, bf16, f16 or f32. The router's parameters are f32.
      kernel_init: makes the matrices, those of experts one by one. Biases begin at zero.
      metadata: metadata of a parameter by its name, as Flax's kernel_metadata:
        {"w_gate_up": {"out_sharding": ("expert", None, None)}}.
      rngs: its stream `params` is drawn from.
      options: of moe.moe_layer: recipe, implementation, gate_up_pieces, expert_axis, exchange,
        parts, capacity_factor, mesh.
    Attributes:
      router, w_gate_up, ...: nnx.Param. moe.block.parameter_shapes(config) lists them. One of them,
        balance_bias, is a BalanceBias, which no gradient trains.
    Raises:
      TypeError: config is no MoEConfig, options has another name, a dtype or the recipe is wrong.
      ValueError: metadata names no parameter of this config, or implementation is wrong.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = _lecun_normal,
        metadata: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        rngs: nnx.Rngs,
        **options: Unpack[RunArguments],
    ):
        check_run_arguments("MoE", options)
        check_dtypes("MoE", dtype, param_dtype)
        shapes = parameter_shapes(config)
        if unknown := sorted(set(metadata) - set(shapes)):
            raise ValueError(f"MoE: metadata must name parameters of {list(shapes)}; got {unknown}")
        for name, shape in shapes.items():
            kind = BalanceBias if name == "balance_bias" else nnx.Param
            value = initial_parameter(rngs.params(), name, shape, param_dtype, kernel_init)
            setattr(self, name, kind(value, **metadata.get(name, {})))
        self.config = config
        self.dtype = dtype
        # NNX keeps it in a static part, which must have a hash.
        self.options: tuple[tuple[str, Any], ...] = tuple(options.items())

    def weights_of_products(self) -> Weights:
        """Returns how the products read the weights, for quantize_weights."""
        names = ("w_gate_up", "w_down", "shared_gate_up", "shared_down")
        options = {n: x for n, x in self.options if n in ("recipe", "implementation")}
        return Weights(tuple(name for name in names if hasattr(self, name)), options)

    @scoped
    def __call__(self, x: jax.Array, *, return_load: bool = False) -> Any:
        """Returns what the block makes of the tokens x (..., d), in `dtype`.

        With return_load it returns also the load, (num_experts,) int32: how many tokens chose each
        expert.
        """
        x = cast_tokens(x, self.dtype)
        parameters = {name: getattr(self, name)[...] for name in parameter_shapes(self.config)}
        return apply_block(
            self.config, parameters, x, return_load=return_load, **dict(self.options)
        )
