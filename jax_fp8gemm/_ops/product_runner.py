"""ProductRunner: runs the products that a model writes with functions of JAX, in FP8 or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data import formats
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import Recipe
from jax_fp8gemm._ops.dot_general import dot_general
from jax_fp8gemm._ops.precision import xla_precision_of


@dataclass(frozen=True)
class ProductRunner:
    """A function like lax.dot_general: how one module of a model runs its products.

    With batch dimensions, a product is one of weights only if an operand has the shape of a
    parameter. Without, it is taken for one. The class has a hash: jnp.einsum keeps traces by it.

    Attributes:
      recipe: that of the module's rule. None leaves the product alone.
      implementation: that of the provider.
      parameter_shapes: the shapes of the module's own parameters.
      is_mapped: whether jax.vmap maps both operands, which is a batch dimension too.
    """

    recipe: Recipe | None
    implementation: Implementation
    parameter_shapes: frozenset[tuple[int, ...]]
    is_mapped: bool

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **kwargs: Any,
    ) -> jax.Array:
        (contracting, _), (batch, _) = dimension_numbers
        run = lax.dot_general
        takes = self.takes(lhs, rhs, precision, preferred_element_type, has_batch=len(batch) > 0)
        if takes and len(contracting) > 0:
            run, kwargs = dot_general, {**kwargs, **self.options}
        return run(lhs, rhs, dimension_numbers, precision, preferred_element_type, **kwargs)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of our products beyond those of JAX's."""
        return dict(recipe=self.recipe, implementation=self.implementation)

    def takes(
        self,
        lhs: Any,
        rhs: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        has_batch: bool = False,
        **kwargs: Any,
    ) -> bool:
        """Returns whether the product runs in FP8. Further arguments have no part in it."""
        dtypes = [jnp.result_type(x) for x in (lhs, rhs)]
        dtypes += [] if preferred_element_type is None else [jnp.dtype(preferred_element_type)]
        if self.recipe is None or not set(dtypes) <= set(formats.FLOAT_DTYPES):
            return False
        if not _is_default(precision):
            return False
        shapes = {jnp.shape(lhs), jnp.shape(rhs)}
        return not (has_batch or self.is_mapped) or not shapes.isdisjoint(self.parameter_shapes)


def _is_default(precision: Any) -> bool:
    try:
        return xla_precision_of("qwix", precision) is None
    except ValueError:
        return False
