"""Quantization: what MaxText's layers take as `quant`, with the products of this package.

MaxText makes its own in maxtext.layers.quantizations.configure_quantization. docs/conversion.md
says how to put this one in its place, and what to do about grouped products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._ops.bind import bind
from jax_fp8gemm._ops.dot_general import dot_general
from jax_fp8gemm._ops.einsum import einsum
from jax_fp8gemm._ops.product_spec import check_recipe

try:
    from flax import linen
except ImportError as error:
    raise ImportError(
        f"jax_fp8gemm.maxtext: the package flax must be installed; got {error}. "
        "Install it with `pip install flax`."
    ) from error


class DotGeneral(linen.Module):
    """lax.dot_general in FP8, as the module without parameters that MaxText's layers make."""

    recipe: Recipe = DEEPSEEK_V3
    implementation: Implementation = None

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns jax_fp8gemm.dot_general of the arguments."""
        return bind(dot_general, self.recipe, self.implementation)(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Runs the dense layers and the einsums of a MaxText model in FP8.

    It has the interface of maxtext.layers.quantizations.Quantization of MaxText 0.2.5, and adds no
    parameters and no state. Attention's products are not its concern: MaxText does not ask it.

    Attributes:
      recipe: the formats and scale blocks.
      implementation: as for jax_fp8gemm.matmul.
    Raises:
      TypeError: recipe is no Recipe.
      ValueError: implementation is wrong.
    """

    recipe: Recipe = DEEPSEEK_V3
    implementation: Implementation = None

    # What MaxText reads: the products draw no random numbers, and no weights are stored quantised.
    needs_apply_rngs: ClassVar[bool] = False
    quant_mode: ClassVar[str] = "train"

    def __post_init__(self) -> None:
        check_recipe("maxtext.Quantization", self.recipe)
        checks.check_implementation("maxtext.Quantization", self.implementation)

    def dot_general_cls(self, mesh_axes: Any = ()) -> Callable[[], DotGeneral]:
        """Returns what makes the module of a product. mesh_axes has no part in it."""
        return functools.partial(DotGeneral, self.recipe, self.implementation)

    def einsum(self, mesh_axes: Any = ()) -> Callable[..., jax.Array]:
        """Returns jax_fp8gemm.einsum. The argument, axes or a dtype, has no part in it."""
        return bind(einsum, self.recipe, self.implementation)
