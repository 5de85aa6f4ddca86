"""ragged_dot: one product for each group of rows, FP8 inside, with its own derivatives.

For lhs (m, k), rhs (g, k, n), the cotangent dout (m, n) and the rows of group i, its tokens, in
brackets the scale blocks of each operand along the contraction:

    out[rows]  = lhs[rows]   [1x128 along k]      . rhs[i]     [128x128]            1d2d
    dlhs[rows] = dout[rows]  [1x128 along n]      . rhs[i]^T   [128x128]            1d2d, out's
    drhs[i]    = lhs[rows]^T [1x128 along tokens] . dout[rows] [1x128 along tokens] 1d1d

Accumulation is f32 throughout. Where groups begin is computed on the device (_data/groups.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.out_sharding import check_out_sharding
from jax_fp8gemm._ops.product_spec import (
    ProductSpec,
    check_precision,
    make_spec,
    name_residual,
    out_spec_of,
    quantize_args,
    with_shardings,
)
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm._ops.ragged_xla import xla_ragged_contraction, xla_ragged_dot
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._ops.scaled_products import gemm_as, wgrad_as
from jax_fp8gemm._ops.weights import both_ways, check_weights, transposed, without_gradient
from jax_fp8gemm._primitives.quantize_ragged import rows_and_ragged_columns
from jax_fp8gemm._sharding.explicit_axes import reshard
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate, settle

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@naming_devices
def ragged_dot(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"] | ScaledArray,
    group_sizes: Int[Array, " g"],
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Int[Array, " 1"] | None = None,
    *,
    recipe: Recipe = DEEPSEEK_V3,
    implementation: Implementation = None,
    out_sharding: Any = None,
) -> Float[Array, "m n"]:
    """Multiplies each group of rows by its own matrix, in FP8 with f32 accumulation.

    The next group_sizes[i] rows of lhs are multiplied by rhs[i]. Arguments as in
    jax.lax.ragged_dot, which it can replace; differentiable once, in reverse mode. Any m, n, k and
    1 to 1024 groups of any sizes, which stay on the device. vmap runs one element after another.

    Args:
      lhs: (m, k) bf16, f16 or f32, rows sorted by group; integers as for matmul.
      rhs: (g, k, n), likewise; or a ScaledArray (g, k, n) with block (128, 128), quantised
        once for many products, without a gradient. Give it `transposed` (quantize
        with_transpose=True), which is what the product reads.
      group_sizes: (g,) integers. A negative size counts as 0, rows past m as none. Rows past
        the sum are zero in the result and in the gradient, whatever lhs holds there.
      precision: None or DEFAULT: FP8. HIGH or HIGHEST, for either operand: jax.lax.ragged_dot.
      preferred_element_type: as for matmul.
      group_offset: (1,) integer: rhs holds the g groups from this one on, of the G >= g groups that
        group_sizes has then. Rows of the other groups are zero. Clamped to 0..G-g.
      recipe: formats and scale blocks; DEEPSEEK_V3, HYBRID, BF16 or another.
      implementation: None, the kernels where they can run and the reference elsewhere, with one
        warning; "cuda", the kernels or an error; "xla", the reference.
      out_sharding: sharding of the result over Explicit mesh axes; default that of lhs in m and of
        rhs in n. Needed where both are sharded over one in k.
    Returns:
      (m, n) array. Gradients have the dtypes of their operands, that of an empty group is zero;
      group_sizes has none.
    Raises:
      TypeError: a dtype, shapes, as in lax.
      ValueError: group_offset, more than 1024 groups, precision, implementation, scale block.
      NotImplementedError: a second derivative.
      RuntimeError: implementation="cuda" where the kernels cannot run.

    On a mesh, under jit, each device multiplies its shards, as in matmul; rows are cut anywhere.
    Where k is sharded, or g, partial sums are added, in f32 unless the recipe says otherwise. For
    the gradient of rhs a device trades its rows for columns of all rows, so that the scale blocks
    stay those of one device.

    The backward pass keeps what matmul's does, under the same names (CHECKPOINT_NAMES).
    """
    op = "ragged_dot"
    operands = map(checks.as_array, (lhs, rhs, group_sizes, group_offset))
    lhs, rhs, group_sizes, group_offset = operands
    lhs, rhs = checks.match_floats(lhs, rhs)
    check_operands(op, lhs, rhs, group_sizes, group_offset)
    is_scaled = isinstance(rhs, ScaledArray)
    spec = make_spec(
        op, lhs, None if is_scaled else rhs, recipe, preferred_element_type, implementation
    )
    xla_precision = check_precision(op, precision, spec)
    check_out_sharding(op, out_sharding, (lhs, rhs))
    group_sizes, group_offset = jax.tree.map(
        lambda x: replicate(op, _groups.as_int32(x)), (group_sizes, group_offset)
    )
    lhs, rhs = jax.tree.map(lambda x: settle(op, jnp.asarray(x)), (lhs, rhs))
    out_spec = _out_spec(spec, lhs, rhs, out_sharding)
    groups = _local_groups(group_sizes, group_offset, lhs.shape[0], rhs.shape[0])
    if xla_precision is None and spec.recipe.is_fp8:
        out = _grouped_product(with_shardings(spec, lhs, rhs, out_spec), lhs, rhs, *groups)
    else:
        rhs = rhs.dequantize(lhs.dtype) if isinstance(rhs, ScaledArray) else rhs
        out = xla_ragged_dot(lhs, rhs, *groups, xla_precision, spec.out_dtype, out_spec)
    return reshard(out, out_spec)


def _out_spec(
    spec: ProductSpec, lhs: jax.Array, rhs: Any, out_sharding: Any
) -> PartitionSpec | None:
    """How Explicit mesh axes cut the result: as that of lhs times one of the matrices.

    None where no axis is Explicit.
    """
    if out_sharding is not None:
        return getattr(out_sharding, "spec", out_sharding)
    aval = jax.typeof(rhs.values if isinstance(rhs, ScaledArray) else rhs)
    sharding = aval.sharding.update(spec=PartitionSpec(*aval.sharding.spec[1:]))
    matrix = jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype, sharding=sharding)
    return out_spec_of(jnp.matmul, spec.out_dtype, lhs, matrix)


def check_operands(op: str, lhs: Any, rhs: Any, group_sizes: Any, group_offset: Any) -> None:
    """Raises unless these are operands of ragged_dot."""
    check_unquantised(op, "lhs", lhs)
    hint = "Map leading dimensions with jax.vmap."
    checks.check_ndim(op, "lhs", lhs, 2, "(m, k)", hint=hint, error=TypeError)
    check_weights(op, "rhs", rhs)
    checks.check_ndim(op, "rhs", rhs, 3, "(g, k, n)", error=TypeError)
    checks.check_same_k(op, lhs, lhs.shape[1], rhs, rhs.shape[1], error=TypeError)
    checks.check_array(op, "group_sizes", group_sizes)
    num_groups = rhs.shape[0] if group_offset is None else None
    _groups.check_group_sizes(op, group_sizes, num_groups, error=TypeError)
    _groups.check_rows(op, lhs, lhs.shape[0], group_sizes)
    if group_offset is None:
        return
    checks.check_array(op, "group_offset", group_offset)
    if group_offset.shape != (1,) or not jnp.issubdtype(group_offset.dtype, jnp.integer):
        raise ValueError(
            f"{op}: group_offset must be an integer (1,); "
            f"got group_offset {checks.short_type(group_offset)}"
        )
    if group_sizes.shape[0] < rhs.shape[0]:
        raise ValueError(
            f"{op}: group_sizes must have at least the {rhs.shape[0]} groups of rhs; "
            f"got group_sizes {checks.short_type(group_sizes)}"
        )


def _local_groups(
    group_sizes: jax.Array, group_offset: Any, m: int, g: int
) -> tuple[jax.Array, jax.Array]:
    """Sizes of the groups that rhs holds, and the row before which the first one starts."""
    if group_offset is None:
        return group_sizes, jnp.zeros((1,), jnp.int32)
    starts, ends = _groups.row_ranges(group_sizes, jnp.zeros((1,), jnp.int32), m)
    sizes = lax.dynamic_slice_in_dim(ends - starts, group_offset[0], g)
    return sizes, lax.dynamic_slice_in_dim(starts, group_offset[0], g)[:1]


@jax.named_scope("fp8gemm_ragged_dot")
def _grouped_product(spec: ProductSpec, lhs, rhs, sizes, first_row) -> jax.Array:
    rhs = without_gradient("ragged_dot", "rhs", rhs)
    operands = match_varying(lhs, rhs, sizes, first_row)
    return reverse_mode("ragged_dot", partial(_product, spec), *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: ProductSpec, lhs: jax.Array, rhs: Any, sizes, first_row) -> jax.Array:
    rows = quantize(lhs, **quantize_args(spec, spec.recipe.fwd))
    groups, out_spec = (sizes, first_row), spec.shardings.out
    return gemm_as(spec, spec.out_dtype, rows, transposed(spec, rhs), *groups, out_spec)


def _product_fwd(spec: ProductSpec, lhs: jax.Array, rhs: Any, sizes, first_row) -> tuple[Any, Any]:
    """Quantises for both passes; under jit, what no wanted cotangent reads is not computed."""
    args = quantize_args(spec, spec.recipe.fwd)
    if spec.rhs_dtype is not None and spec.recipe.wgrad == "fp8":
        rows, lhs_residual = rows_and_ragged_columns(lhs, sizes, first_row, **args)
    else:
        rows, lhs_residual = quantize(lhs, **args), None if spec.rhs_dtype is None else lhs
    rhs_residual, rhs_transposed = both_ways(spec, spec.recipe.fwd, rhs)
    groups, out_spec = (sizes, first_row), spec.shardings.out
    out = gemm_as(spec, spec.out_dtype, rows, rhs_transposed, *groups, out_spec)
    kept = name_residual("lhs", lhs_residual), name_residual("rhs", rhs_residual)
    return name_residual("out", out), (*kept, sizes, first_row)


def _product_bwd(spec: ProductSpec, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, sizes, first_row = residuals
    args = quantize_args(spec, spec.recipe.bwd)
    columns = None
    if spec.rhs_dtype is not None and spec.recipe.wgrad == "fp8":
        rows, columns = rows_and_ragged_columns(dout, sizes, first_row, **args)
    else:
        rows = quantize(dout, **args)
    with jax.named_scope("dlhs"):
        dlhs = gemm_as(spec, spec.lhs_dtype, rows, rhs, sizes, first_row, spec.shardings.lhs)
    if spec.rhs_dtype is None:
        return dlhs, None, None, None
    with jax.named_scope("drhs"):
        rhs_spec = spec.shardings.rhs
        if columns is None:
            drhs = _bf16_wgrad(lhs, dout, sizes, first_row, rhs_spec).astype(spec.rhs_dtype)
        else:
            drhs = wgrad_as(spec, spec.rhs_dtype, lhs, columns, sizes, rhs_spec)
    return dlhs, drhs, None, None


_product.defvjp(_product_fwd, _product_bwd)


def _bf16_wgrad(lhs: jax.Array, dout: jax.Array, sizes, first_row, out_spec) -> jax.Array:
    lhs, dout = lhs.astype(jnp.bfloat16), dout.astype(jnp.bfloat16)
    return xla_ragged_contraction(lhs, dout, sizes, first_row, None, jnp.float32, out_spec)
