"""Linear, LinearGeneral and Einsum: Flax's own classes with another product."""

from __future__ import annotations

from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import promote_weights
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._ops.bind import bind
from jax_fp8gemm._ops.dot_general import dot_general
from jax_fp8gemm._ops.einsum import einsum
from jax_fp8gemm.nnx._scopes import scoped
from jax_fp8gemm.nnx._weights import Weights, weights_of_einsum


def _promote_dtype(args: tuple[Any, ...], /, **how: Any) -> Any:
    """Returns Flax's promotion of the arrays; a QuantizedWeight keeps its quantisation."""
    return promote_weights(lambda arrays: dtypes.promote_dtype(tuple(arrays), **how), args)


def _num_dims(features: int | tuple[int, ...]) -> int:
    return len(features) if isinstance(features, tuple) else 1


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
        for name in ("dot_general", "dot_general_cls"):
            if (given := kwargs.pop(name, None)) is not None:
                raise TypeError(
                    f"{type(self).__name__}: {name} must be left out, for the recipe names the "
                    f"product; got {given}. Use flax.nnx's own module for another product."
                )
        kwargs |= dict(dot_general=bind(dot_general, recipe, implementation))
        kwargs.setdefault("promote_dtype", _promote_dtype)
        # Flax's class comes next, in the order of bases.
        super().__init__(in_features, out_features, **kwargs)  # pyright: ignore[reportCallIssue]

    def weights_of_products(self) -> Weights:
        """Returns how the product reads the kernel, for quantize_weights."""
        module: Any = self
        num_batch = len(getattr(module, "batch_axis", ()))
        num_in, num_out = map(_num_dims, (module.in_features, module.out_features))
        how, contracting = module.dot_general.keywords, tuple(range(num_in))
        ndim = num_batch + num_in + num_out
        return Weights(("kernel",), how, contracting, num_batch, module.dtype, ndim)


class Linear(_InFp8, nnx.Linear):
    """nnx.Linear with its product in FP8.

    Args:
      in_features, out_features, kwargs: as for nnx.Linear, `dot_general` aside.
      recipe, implementation: as for jax_fp8gemm.dot_general.
    Raises:
      TypeError: `dot_general` is given.
    """

    __call__ = scoped(nnx.Linear.__call__)


class LinearGeneral(_InFp8, nnx.LinearGeneral):
    """nnx.LinearGeneral with its product in FP8.

    Args:
      in_features, out_features, kwargs: as for nnx.LinearGeneral, `dot_general` and
        `dot_general_cls` aside.
      recipe, implementation: as for jax_fp8gemm.dot_general.
    Raises:
      TypeError: one of these two is given.
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
