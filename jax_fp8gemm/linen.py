"""Modules of Flax Linen whose products run in FP8: Dense, DenseGeneral, Einsum and MoE.

Dense, DenseGeneral and Einsum are Flax's own classes with another product. Their attributes,
parameters and initialisers are Flax's, so a checkpoint of one loads into the other. It needs Flax,
which `import jax_fp8gemm` does not import.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import promote_weights
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._ops.dot_general import dot_general
from jax_fp8gemm._ops.einsum import einsum
from jax_fp8gemm.moe.block import (
    Initializer,
    apply_block,
    cast_tokens,
    check_dtypes,
    check_run_arguments,
    initial_parameter,
    parameter_shapes,
)
from jax_fp8gemm.moe.configs import MoEConfig

try:
    from flax import linen as nn
    from flax.core import FrozenDict
    from flax.linen.dtypes import promote_dtype
except ImportError as error:
    raise ImportError("jax_fp8gemm.linen needs Flax: pip install flax") from error


class _DotGeneral(functools.partial):
    """dot_general with the recipe and the implementation of a module."""


def _promote_dtype(*args: Any, **how: Any) -> Any:
    """Returns Flax's promotion of the arrays; a QuantizedWeight keeps its quantisation."""
    return promote_weights(lambda arrays: promote_dtype(*arrays, **how), args)


class _InFp8(nn.Module):
    """What Dense and DenseGeneral add to Flax's modules."""

    recipe: Recipe | str = DEEPSEEK_V3
    implementation: Implementation = None
    promote_dtype: Any = _promote_dtype

    def __post_init__(self) -> None:
        # A clone with another recipe has the product of the first one: it gets another product.
        product = getattr(self, "dot_general", None)
        if product is None or isinstance(product, _DotGeneral):
            how = dict(recipe=self.recipe, implementation=self.implementation)
            # Flax's __setattr__ works from the end of its __post_init__ on.
            object.__setattr__(self, "dot_general", _DotGeneral(dot_general, **how))
        super().__post_init__()


class Dense(_InFp8, nn.Dense):
    """nn.Dense with its product in FP8.

    Attributes:
      recipe, implementation: as for jax_fp8gemm.dot_general. A dot_general or dot_general_cls that
        is given takes its place.
    """


class DenseGeneral(_InFp8, nn.DenseGeneral):
    """nn.DenseGeneral with its product in FP8.

    Attributes:
      recipe, implementation: as for jax_fp8gemm.dot_general. A dot_general or dot_general_cls that
        is given takes its place.
    """


class Einsum(nn.Einsum):
    """nn.Einsum with its product in FP8.

    Attributes:
      recipe, implementation: as for jax_fp8gemm.einsum.
    """

    recipe: Recipe | str = DEEPSEEK_V3
    implementation: Implementation = None
    promote_dtype: Any = _promote_dtype

    @nn.compact
    def __call__(self, inputs: Any, einsum_str: str | None = None) -> Any:
        """Returns the einsum of `inputs` and the kernel, plus the bias.

        Args:
          inputs: an array, the first operand of the equation.
          einsum_str: the equation, if it is not an attribute.
        """
        spec = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if "->" not in spec or spec.count(",") != 1:
            raise ValueError(
                f"Einsum: einsum_str must have two operands and an explicit result; got {spec!r}"
            )
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, spread = None, ()
        if self.use_bias:
            shape, spread = self._get_bias_shape(spec, inputs, kernel)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        promoted: list[Any] = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        inputs, kernel, bias = promoted
        y = einsum(
            spec,
            inputs,
            kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            recipe=self.recipe,
            implementation=self.implementation,
        )
        return y if bias is None else y + jnp.reshape(bias, spread)


class MoE(nn.Module):
    """A mixture of experts: router, experts and shared experts.

    The balance bias, if the config has one, is in the collection "balance", which no gradient
    trains. moe.update_balance_bias computes its next value from the load.

    Attributes:
      config: sizes, router and activation: one of moe.configs, or a MoEConfig of your own.
      dtype: that of x and of the result. None keeps that of x. The router computes in f32.
      param_dtype: that of the experts, bf16, f16 or f32. The router's parameters are f32.
      kernel_init: makes the matrices, those of experts one by one. Biases begin at zero.
      axes: mesh axes of a parameter by its name, as those of nn.with_partitioning:
        {"w_gate_up": ("expert", None, None)}.
      options: of moe.moe_layer: recipe, implementation, gate_up_pieces, expert_axis, exchange,
        parts, capacity_factor, mesh.
    """

    config: MoEConfig
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = jax.nn.initializers.lecun_normal()
    axes: Mapping[str, tuple[str | None, ...]] = FrozenDict()
    options: Mapping[str, Any] = FrozenDict()

    @nn.compact
    def __call__(self, x: jax.Array, *, return_load: bool = False) -> Any:
        """Returns what the block makes of the tokens x (..., d), in `dtype`.

        With return_load it returns also the load, (num_experts,) int32: how many tokens chose each
        expert.
        """
        check_run_arguments("MoE", self.options)
        check_dtypes("MoE", self.dtype, self.param_dtype)
        shapes = parameter_shapes(self.config)
        if unknown := sorted(set(self.axes) - set(shapes)):
            raise ValueError(f"MoE: axes must name parameters of {list(shapes)}; got {unknown}")
        parameters = {name: self._parameter(name, shape) for name, shape in shapes.items()}
        x = cast_tokens(x, self.dtype)
        return apply_block(self.config, parameters, x, return_load=return_load, **self.options)

    def _parameter(self, name: str, shape: tuple[int, ...]) -> Any:
        make = lambda key: initial_parameter(key, name, shape, self.param_dtype, self.kernel_init)
        if name == "balance_bias":
            return self.variable("balance", name, jnp.zeros, shape, jnp.float32).value
        if name in self.axes:
            make = nn.with_partitioning(make, self.axes[name])
        return self.param(name, make)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        message = f"module {__name__!r} has no attribute {name!r}"
        if hasattr(nn, name):
            message += f". It is one of Flax: flax.linen.{name}"
        raise AttributeError(message)
