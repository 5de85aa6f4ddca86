"""ragged_dot: one product for each group of rows, in FP8 (_ops/ragged_product.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.product_spec import (
    ProductSpec,
    Weights,
    check_grouped,
    check_static_args,
    out_spec_of,
    type_of,
    with_shardings,
)
from jax_fp8gemm._ops.ragged_product import ragged_product
from jax_fp8gemm._ops.ragged_xla import XlaOptions, xla_ragged_dot
from jax_fp8gemm._ops.weights import check_weights, unquantised
from jax_fp8gemm._sharding.explicit_axes import reshard
from jax_fp8gemm._sharding.manual_axes import replicate, settle

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@naming_devices
def ragged_dot(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"] | QuantizedWeight | ScaledArray,
    group_sizes: Int[Array, " g"],
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Int[Array, " 1"] | None = None,
    *,
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
    out_sharding: Any = None,
) -> Float[Array, "m n"]:
    """Multiplies each group of rows by its own matrix, in FP8 with f32 accumulation.

    The next group_sizes[i] rows of lhs are multiplied by rhs[i]. The arguments are those of
    jax.lax.ragged_dot, which this function can replace. m, n and k may be any numbers; there may be
    1 to 1024 groups of any sizes. The sizes stay on the device. jax.vmap runs one element after
    another. The product is differentiable once, in reverse mode. Its formats and scale blocks are
    those of the DeepSeek-V3 report, section 3.3, unless the recipe says otherwise.

    Args:
      lhs: (m, k) bf16, f16 or f32, rows sorted by group. It may hold integers, as for matmul.
      rhs: (g, k, n), like lhs. Or a ScaledArray (g, k, n) with block (128, 128), quantised once for
        many products. It has no gradient. Which orientation to store is as for matmul. Or a
        QuantizedWeight of (g, k, n), which has a gradient.
      group_sizes: (g,) integers. A negative size counts as 0. A group that would end past row m
        ends there. Rows past the sum are zero in the result and in the gradient, whatever lhs
        holds there.
      precision: None or DEFAULT means FP8. HIGH or HIGHEST, for either operand, means
        jax.lax.ragged_dot.
      preferred_element_type: as for matmul.
      group_offset: (1,) integer. rhs then holds g of the G >= g groups of group_sizes: those from
        this one on. Rows of other groups are zero in the result. It is clamped to 0..G-g.
      recipe: the formats and scale blocks: DEEPSEEK_V3, HYBRID, BF16 or another Recipe.
      implementation: None runs the kernels where they can run, and elsewhere the reference, with
        one warning. "cuda" runs the kernels or raises. "xla" runs the reference.
        "emulate" gives the bits of the kernels on any machine, slowly.
      out_sharding: the sharding of the result over Explicit mesh axes. The default is that of lhs
        in m and of rhs in n. It is needed if an axis cuts both operands in k.
    Returns:
      (m, n) array. Gradients have the dtypes of their operands. The gradient of the matrix of an
      empty group is zero. group_sizes has no gradient.
    Raises:
      TypeError: a dtype or a shape is wrong, as in lax.
      ValueError: group_offset, precision, implementation or a scale block is wrong, or there are
        more than 1024 groups.
      NotImplementedError: a second derivative is taken.
      RuntimeError: implementation="cuda", and the kernels cannot run.

    On a mesh, under jit, each device multiplies its shards, as in matmul. Rows may be cut anywhere.
    Where k or g is sharded, the devices add partial sums, in f32 unless the recipe says otherwise.
    For the gradient of rhs the devices exchange rows for columns, so that each gets some columns of
    all rows. The scale blocks are then the same as on one device.

    The backward pass keeps what matmul's does, under the same names (CHECKPOINT_NAMES).
    """
    op = "ragged_dot"
    operands = map(arrays.as_array, (lhs, rhs, group_sizes, group_offset))
    lhs, rhs, group_sizes, group_offset = operands
    lhs, rhs = arrays.match_floats(lhs, rhs)
    check_operands(op, lhs, rhs, group_sizes, group_offset)
    spec = check_static_args(
        op, lhs, rhs, recipe, precision, preferred_element_type, implementation, out_sharding
    )
    check_grouped(op, spec)
    group_sizes = replicate(op, _groups.sizes_as_int32(group_sizes))
    if group_offset is not None:
        group_offset = replicate(op, _groups.as_int32(group_offset))
    lhs, rhs = jax.tree.map(lambda x: settle(op, jnp.asarray(x)), (lhs, rhs))
    out_spec = _out_spec(spec, lhs, rhs, out_sharding)
    groups = _local_groups(group_sizes, group_offset, lhs.shape[0], rhs.shape[0])
    if spec.is_fp8:
        out = ragged_product(with_shardings(spec, lhs, rhs, out_spec), lhs, rhs, groups)
    else:
        is_scaled = isinstance(rhs, ScaledArray)
        rhs = rhs.dequantize(lhs.dtype) if is_scaled else unquantised(rhs)
        options = XlaOptions(spec.xla_precision, spec.out_dtype, out_spec)
        out = xla_ragged_dot(lhs, rhs, groups, options)
    return reshard(out, out_spec)


def _out_spec(
    spec: ProductSpec, lhs: jax.Array, rhs: Weights, out_sharding: Any
) -> PartitionSpec | None:
    """Returns how Explicit mesh axes cut the result, or None where no axis is Explicit.

    By default they cut it as they cut the product of lhs and one of the matrices.
    """
    if out_sharding is not None:
        return getattr(out_sharding, "spec", out_sharding)
    aval = type_of(rhs)
    sharding = aval.sharding.update(spec=PartitionSpec(*aval.sharding.spec[1:]))
    matrix = jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype, sharding=sharding)
    return out_spec_of(jnp.matmul, spec.out_dtype, lhs, matrix)


def check_operands(op: str, lhs: Any, rhs: Any, group_sizes: Any, group_offset: Any) -> None:
    """Raises unless ragged_dot takes these operands."""
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


def _local_groups(group_sizes: jax.Array, group_offset: jax.Array | None, m: int, g: int) -> Groups:
    """Returns the groups that rhs holds: g of them, from group_offset on."""
    if group_offset is None:
        return Groups.of_sizes(group_sizes)
    starts, ends = _groups.row_ranges(*Groups.of_sizes(group_sizes), m)
    # NOTE: XLA's own clamp is lost where it divides the slice among devices.
    first = jnp.clip(group_offset[0], 0, starts.shape[0] - g)
    sizes = lax.dynamic_slice_in_dim(ends - starts, first, g)
    return Groups(sizes, lax.dynamic_slice_in_dim(starts, first, g)[:1])
