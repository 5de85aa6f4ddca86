"""What is static about a differentiable product: recipe, dtypes, precision, sharding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DTYPES, REDUCE_DTYPES, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh

# For jax.checkpoint_policies.save_only_these_names: the residuals and the result.
CHECKPOINT_NAMES = ("fp8gemm_lhs", "fp8gemm_rhs", "fp8gemm_out")
# Those of jax.lax.DotAlgorithmPreset for the dtypes that the ops take.
_ALGORITHMS = (
    "DEFAULT",
    *("BF16_BF16_BF16", "BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6"),
    *("BF16_BF16_F32_X9", "F16_F16_F16", "F16_F16_F32", "TF32_TF32_F32", "TF32_TF32_F32_X3"),
    "F32_F32_F32",
)


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
    """What is static about one product."""

    recipe: Recipe
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any
    implementation: Implementation
    shardings: Shardings = Shardings()

    @property
    def reduce_dtype(self) -> Any:
        """Of the partial sums that devices add."""
        return REDUCE_DTYPES[self.recipe.reduce_dtype]


def with_shardings(
    spec: ProductSpec, lhs: jax.Array, rhs: Any, out_spec: PartitionSpec | None
) -> ProductSpec:
    """`spec` for these operands, and a result that Explicit mesh axes cut as out_spec says."""
    return replace(spec, shardings=shardings_of(lhs, rhs, out_spec))


def shardings_of(lhs: jax.Array, rhs: Any, out_spec: PartitionSpec | None) -> Shardings:
    """Those of these operands, and out_spec without sums that are not added up."""
    if out_spec is None:
        return Shardings()
    rhs = rhs.values if isinstance(rhs, ScaledArray) else rhs
    lhs_spec, rhs_spec = (jax.typeof(x).sharding.spec for x in (lhs, rhs))
    return Shardings(lhs_spec, rhs_spec, PartitionSpec(*out_spec.partitions))


def check_recipe(op: str, recipe: Any) -> None:
    """TypeError unless `recipe` is a Recipe."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{op}: recipe must be a jax_fp8gemm.Recipe; got {checks.short_repr(recipe)}"
        )


def make_spec(
    op: str, lhs: Any, rhs: Any, recipe: Any, preferred_element_type: Any, implementation: Any
) -> ProductSpec:
    """Checks what is static; `rhs` is None where it is quantised already."""
    check_recipe(op, recipe)
    checks.check_implementation(op, implementation)
    dtypes = {jnp.dtype(x.dtype) for x in (lhs, rhs) if x is not None}
    # bf16, f16 and f32 promote to f32 unless equal.
    out_dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)
    if preferred_element_type is not None:
        name = "preferred_element_type"
        out_dtype = checks.check_out_dtype(op, name, preferred_element_type, formats.FLOAT_DTYPES)
    rhs_dtype = None if rhs is None else jnp.dtype(rhs.dtype)
    return ProductSpec(recipe, jnp.dtype(lhs.dtype), rhs_dtype, out_dtype, implementation)


def check_precision(op: str, precision: Any, spec: ProductSpec) -> Any:
    """None for FP8, or what an XLA dot is to have: a pair of precisions, or an algorithm."""
    xla_precision = _xla_precision(op, precision)
    is_xla = xla_precision is not None
    if spec.implementation == "cuda" and (is_xla or not spec.recipe.is_fp8):
        raise ValueError(
            f"{op}: implementation='cuda' must go with an FP8 recipe and default precision; "
            f"got precision {checks.short_repr(precision)}, {spec.recipe}"
        )
    return xla_precision


def _xla_precision(op: str, precision: Any) -> Any:
    if isinstance(precision, lax.DotAlgorithmPreset) and precision.name in _ALGORITHMS:
        return None if precision == lax.DotAlgorithmPreset.DEFAULT else precision
    pair = tuple(precision) if isinstance(precision, tuple | list) else (precision, precision)
    try:
        pair = tuple(lax.Precision.DEFAULT if p is None else lax.Precision(p) for p in pair)
    except (ValueError, KeyError, TypeError):
        pair = ()
    if len(pair) != 2:
        raise ValueError(
            f"{op}: precision must be None, DEFAULT, HIGH or HIGHEST, a pair of them, or a "
            "DotAlgorithmPreset of bf16, f16, tf32 or f32; "
            f"got {checks.short_repr(precision)}"
        )
    return pair if any(p != lax.Precision.DEFAULT for p in pair) else None


def out_spec_of(xla: Any, dtype: Any, lhs: Any, rhs: Any) -> PartitionSpec | None:
    """The PartitionSpec that `xla(lhs, rhs)` would have; None where no mesh axis is Explicit."""
    if explicit_mesh((lhs, rhs)) is None:
        return None
    rhs = rhs.values if isinstance(rhs, ScaledArray) else rhs
    cast = lambda x: x.astype(dtype)
    # Not eval_shape, which tells a sharding only where all axes are Explicit.
    closed = jax.make_jaxpr(lambda lhs, rhs: xla(cast(lhs), cast(rhs)))(lhs, rhs)
    out: Any = closed.out_avals[0]
    return out.sharding.spec


def quantize_args(spec: ProductSpec, fmt: Any) -> QuantizeArgs:
    """The arguments of quantize and its kin for operands of format `fmt`."""
    return QuantizeArgs(
        dtype=DTYPES[fmt],
        pow2_scale=bool(spec.recipe.pow2_scale),
        implementation=spec.implementation,
    )


def kernel_dtype(dtype: Any) -> Any:
    """What a kernel returns for a result of `dtype`: f16 comes by way of f32."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def name_residual(name: str, tree: Any) -> Any:
    """`tree` under its name of CHECKPOINT_NAMES: "lhs", "rhs" or "out"."""
    assert f"fp8gemm_{name}" in CHECKPOINT_NAMES
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, f"fp8gemm_{name}"), tree)
