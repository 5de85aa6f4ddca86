"""ProductSpec: the static properties of a differentiable product, and how they are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.quantized_weight_checks import check_quantised_by
from jax_fp8gemm._data.recipe import DTYPES, NAMED, REDUCE_DTYPES, Format, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.out_sharding import check_out_sharding
from jax_fp8gemm._ops.precision import XlaPrecision, xla_precision_of
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh
from jax_fp8gemm._sharding.manual_axes import check_reduced

# For jax.checkpoint_policies.save_only_these_names: the residuals and the result.
CHECKPOINT_NAMES = ("fp8gemm_lhs", "fp8gemm_rhs", "fp8gemm_out")

DType: TypeAlias = np.dtype[Any]
# The rhs of a product. A QuantizedWeight and a ScaledArray are quantised already. The latter has no
# gradient.
Weights: TypeAlias = jax.Array | QuantizedWeight | ScaledArray


@dataclass(frozen=True)
class Shardings:
    """How Explicit mesh axes cut the operands of a product and its result.

    Each is None where no axis is Explicit.
    """

    lhs: PartitionSpec | None = None
    rhs: PartitionSpec | None = None
    out: PartitionSpec | None = None


@dataclass(frozen=True)
class ProductSpec:
    """The static properties of one product, dense or grouped.

    Attributes:
      recipe: the formats and scale blocks.
      lhs_dtype: the dtype of lhs and of its gradient.
      rhs_dtype: that of rhs, or None where rhs is quantised already and has no gradient.
      out_dtype: the dtype of the result.
      implementation: as the caller gave it.
      xla_precision: None for FP8, or the precision of the XLA dot that the caller asked for.
      rhs_recipe: that of rhs if it is a QuantizedWeight, else None.
      shardings: how Explicit mesh axes cut the operands and the result.
    """

    recipe: Recipe
    lhs_dtype: DType
    rhs_dtype: DType | None
    out_dtype: DType
    implementation: Implementation
    xla_precision: XlaPrecision | None = None
    rhs_recipe: Recipe | None = None
    shardings: Shardings = Shardings()

    @property
    def is_fp8(self) -> bool:
        """Whether the product runs in FP8, not as an XLA dot."""
        return self.recipe.is_fp8 and self.xla_precision is None

    @property
    def is_exact(self) -> bool:
        """Whether the product runs in integers, as exact_product does."""
        return self.recipe.batch_invariant and not self.recipe.is_fp8 and self.xla_precision is None

    @property
    def has_fp8_wgrad(self) -> bool:
        """Whether the gradient of rhs is wanted, and is a product of FP8 operands."""
        return self.rhs_dtype is not None and self.recipe.wgrad == "fp8"

    @property
    def reduce_dtype(self) -> DType:
        """The dtype of the partial sums that devices add."""
        return REDUCE_DTYPES[self.recipe.reduce_dtype]

    def kept_rhs(self, rhs: Any) -> Any:
        """Returns quantised weights under their name. Those that were quantised before get none.

        They are operands, so a backward pass has them without a copy, whatever a policy saves.
        """
        is_operand = self.rhs_recipe is not None or self.rhs_dtype is None
        return rhs if is_operand else name_residual("rhs", rhs)

    def gradient_of_rhs(self, drhs: Any) -> Any:
        """Returns `drhs`, which is an array or None, as the gradient of what rhs is."""
        return drhs if self.rhs_recipe is None else QuantizedWeight(drhs, None, self.rhs_recipe)

    def xla_args(self, out_sharding: Any) -> dict[str, Any]:
        """Returns the arguments of jnp.matmul or lax.dot_general for this product."""
        return dict(
            precision=self.xla_precision,
            preferred_element_type=self.out_dtype,
            out_sharding=out_sharding,
        )


def with_shardings(
    spec: ProductSpec, lhs: jax.Array, rhs: Weights, out_spec: PartitionSpec | None
) -> ProductSpec:
    """Returns `spec` for these operands, and a result that Explicit axes cut as out_spec says."""
    return replace(spec, shardings=shardings_of(lhs, rhs, out_spec))


def shardings_of(lhs: jax.Array, rhs: Weights, out_spec: PartitionSpec | None) -> Shardings:
    """Returns the shardings of these operands, and out_spec without its unreduced axes."""
    if out_spec is None:
        return Shardings()
    lhs_spec, rhs_spec = jax.typeof(lhs).sharding.spec, type_of(rhs).sharding.spec
    return Shardings(lhs_spec, rhs_spec, PartitionSpec(*out_spec.partitions))


def type_of(w: Weights) -> Any:
    """Returns the type of an array or weight, or of a ScaledArray's values, with its sharding."""
    if not isinstance(w, ScaledArray):
        return jax.typeof(w.weight if isinstance(w, QuantizedWeight) else w)
    if w.values is not None:
        return jax.typeof(w.values)
    sharding = jax.typeof(w.transposed).sharding
    *batch, c, r = sharding.spec
    sharding = sharding.update(spec=PartitionSpec(*batch, r, c))
    return jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)


def check_recipe(op: str, recipe: Any) -> Recipe:
    """Returns the recipe, which may be given by its name; raises TypeError unless it is one."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in NAMED:
        *names, last = map(repr, NAMED)
        expected = f"{', '.join(names)} or {last}"
        got = checks.short_repr(recipe)
        raise TypeError(f"{op}: recipe must be a jax_fp8gemm.Recipe, {expected}; got {got}")
    return NAMED[recipe]


def check_static_args(
    op: str,
    lhs: Any,
    rhs: Any,
    recipe: Any,
    precision: Any,
    preferred_element_type: Any,
    implementation: Any,
    out_sharding: Any,
) -> ProductSpec:
    """Checks the static arguments of a public product of lhs and rhs, which are arrays."""
    weights = None if isinstance(rhs, ScaledArray) else rhs
    spec = make_spec(op, lhs, weights, recipe, preferred_element_type, implementation)
    spec = replace(spec, xla_precision=check_precision(op, precision, spec))
    check_reduced(op, (lhs, rhs))
    check_out_sharding(op, out_sharding, (lhs, rhs))
    return spec


def make_spec(
    op: str, lhs: Any, rhs: Any, recipe: Any, preferred_element_type: Any, implementation: Any
) -> ProductSpec:
    """Checks the static arguments; `rhs` is None where it is quantised already."""
    recipe = check_recipe(op, recipe)
    checks.check_implementation(op, implementation)
    dtypes = {jnp.dtype(x.dtype) for x in (lhs, rhs) if x is not None}
    # bf16, f16 and f32 promote to f32 unless equal.
    out_dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)
    if preferred_element_type is not None:
        name = "preferred_element_type"
        out_dtype = checks.check_out_dtype(op, name, preferred_element_type, formats.FLOAT_DTYPES)
    rhs_dtype = None if rhs is None else jnp.dtype(rhs.dtype)
    spec = ProductSpec(recipe, jnp.dtype(lhs.dtype), rhs_dtype, out_dtype, implementation)
    if not isinstance(rhs, QuantizedWeight):
        return spec
    check_quantised_by(op, rhs, recipe)
    return replace(spec, rhs_recipe=rhs.recipe)


def check_precision(op: str, precision: Any, spec: ProductSpec) -> XlaPrecision | None:
    """Returns None where `precision` means FP8, else the precision of an XLA dot."""
    xla_precision = xla_precision_of(op, precision)
    is_xla = xla_precision is not None
    if spec.implementation == "cuda" and (is_xla or not spec.recipe.is_fp8):
        raise ValueError(
            f"{op}: implementation='cuda' must go with an FP8 recipe and default precision; "
            f"got precision {checks.short_repr(precision)}, {spec.recipe}"
        )
    return xla_precision


def check_grouped(op: str, spec: ProductSpec) -> None:
    """Raises NotImplementedError where a grouped product would run in integers."""
    if spec.is_exact:
        raise NotImplementedError(
            f"{op}: batch_invariant must go with an FP8 fwd; got {spec.recipe}. A grouped product "
            "without FP8 is one of XLA."
        )


def out_spec_of(
    xla: Callable[[Any, Any], jax.Array], dtype: DType, lhs: Any, rhs: Any
) -> PartitionSpec | None:
    """Returns the PartitionSpec of `xla(lhs, rhs)`, or None where no mesh axis is Explicit."""
    if explicit_mesh((lhs, rhs)) is None:
        return None
    if isinstance(rhs, ScaledArray):
        rhs = type_of(rhs) if rhs.values is None else rhs.values
    rhs = rhs.weight if isinstance(rhs, QuantizedWeight) else rhs
    cast = lambda x: x.astype(dtype)
    # jax.eval_shape would not do: it returns shardings only where all axes are Explicit.
    closed = jax.make_jaxpr(lambda lhs, rhs: xla(cast(lhs), cast(rhs)))(lhs, rhs)
    out: Any = closed.out_avals[0]
    return out.sharding.spec


def quantize_args(spec: ProductSpec, fmt: Format | None) -> QuantizeArgs:
    """Returns how operands of an FP8 format are quantised: recipe.fwd, say, of an FP8 recipe."""
    assert fmt is not None
    return QuantizeArgs(
        dtype=DTYPES[fmt],
        pow2_scale=bool(spec.recipe.pow2_scale),
        implementation=spec.implementation,
    )


def kernel_dtype(dtype: DType) -> DType:
    """Returns the dtype that a kernel stores for a result of `dtype`: f32 for one in f16."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


def name_residual(name: str, tree: Any) -> Any:
    """Returns `tree` under its name of CHECKPOINT_NAMES: "lhs", "rhs" or "out"."""
    assert f"fp8gemm_{name}" in CHECKPOINT_NAMES
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, f"fp8gemm_{name}"), tree)
