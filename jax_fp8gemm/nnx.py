"""Modules of Flax NNX whose products run in FP8: Linear, LinearGeneral, Einsum, SwiGLU and MoE.

Linear, LinearGeneral and Einsum are Flax's own classes with another product. Their arguments,
parameters and initialisers are Flax's, so a checkpoint of one loads into the other. It needs Flax,
which `import jax_fp8gemm` does not import.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import promote_weights
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._ops.bind import bind
from jax_fp8gemm._ops.dot_general import dot_general
from jax_fp8gemm._ops.einsum import einsum
from jax_fp8gemm.moe import gated_mlp
from jax_fp8gemm.moe.block import (
    Initializer,
    RunArguments,
    apply_block,
    initial_parameter,
    parameter_shapes,
)
from jax_fp8gemm.moe.configs import MoEConfig

try:
    from flax import nnx
    from flax.nnx.nn import dtypes

    from jax_fp8gemm._nnx_scopes import name_scopes as name_scopes
    from jax_fp8gemm._nnx_scopes import scoped
    from jax_fp8gemm._nnx_weights import Weights, weights_of_einsum
    from jax_fp8gemm._nnx_weights import quantize_weights as quantize_weights
except ImportError as error:
    raise ImportError("jax_fp8gemm.nnx needs Flax: pip install flax") from error


_lecun_normal = jax.nn.initializers.lecun_normal()


def _promote_dtype(args: tuple[Any, ...], /, **how: Any) -> Any:
    """Returns Flax's promotion of the arrays; a QuantizedWeight keeps its quantisation."""
    return promote_weights(lambda arrays: dtypes.promote_dtype(tuple(arrays), **how), args)


class _InFp8:
    """What Linear and LinearGeneral add to Flax's modules."""

    def __init__(
        self,
        in_features: Any,
        out_features: Any,
        *,
        recipe: Recipe | str = DEEPSEEK_V3,
        implementation: Implementation = None,
        **kwargs: Any,
    ):
        kwargs |= dict(dot_general=bind(dot_general, recipe, implementation))
        kwargs.setdefault("promote_dtype", _promote_dtype)
        # Flax's class comes next, in the order of bases.
        super().__init__(in_features, out_features, **kwargs)  # pyright: ignore[reportCallIssue]

    def weights_of_products(self) -> Weights:
        """Returns how the product reads the kernel, for quantize_weights."""
        module: Any = self
        num_batch, axis = len(getattr(module, "batch_axis", ())), getattr(module, "axis", -1)
        contracting = tuple(range(len(axis) if isinstance(axis, tuple) else 1))
        how = module.dot_general.keywords
        return Weights(("kernel",), how, contracting, num_batch, module.dtype)


class Linear(_InFp8, nnx.Linear):
    """nnx.Linear with its product in FP8.

    Args:
      in_features, out_features, kwargs: as for nnx.Linear, `dot_general` aside.
      recipe, implementation: as for jax_fp8gemm.dot_general.
    """

    __call__ = scoped(nnx.Linear.__call__)


class LinearGeneral(_InFp8, nnx.LinearGeneral):
    """nnx.LinearGeneral with its product in FP8.

    Args:
      in_features, out_features, kwargs: as for nnx.LinearGeneral, `dot_general` and
        `dot_general_cls` aside.
      recipe, implementation: as for jax_fp8gemm.dot_general.
    """

    __call__ = scoped(nnx.LinearGeneral.__call__)


class Einsum(nnx.Einsum):
    """nnx.Einsum with its product in FP8.

    Args:
      einsum_str, kernel_shape, bias_shape, kwargs: as for nnx.Einsum, `einsum_op` aside.
      recipe, implementation: as for jax_fp8gemm.einsum.
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None = None,
        *,
        recipe: Recipe | str = DEEPSEEK_V3,
        implementation: Implementation = None,
        **kwargs: Any,
    ):
        product = bind(einsum, recipe, implementation)
        kwargs.setdefault("promote_dtype", _promote_dtype)
        super().__init__(einsum_str, kernel_shape, bias_shape, einsum_op=product, **kwargs)

    __call__ = scoped(nnx.Einsum.__call__)

    def weights_of_products(self) -> Weights | None:
        """Returns how the product reads the kernel, for quantize_weights; None if it is no rhs."""
        module: Any = self
        return weights_of_einsum(module.einsum_str, module.einsum_op.keywords, module.dtype)


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
            x.astype(self.dtype or x.dtype),
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
      ValueError: metadata names no parameter of this config. TypeError: options has another name.
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
        known = list(RunArguments.__annotations__)
        if more := sorted(set(options) - set(known)):
            raise TypeError(f"MoE: options must be of {known}; got {more}")
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
        x = x.astype(self.dtype or x.dtype)
        parameters = {name: getattr(self, name)[...] for name in parameter_shapes(self.config)}
        return apply_block(
            self.config, parameters, x, return_load=return_load, **dict(self.options)
        )
