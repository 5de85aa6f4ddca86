"""scaled_ragged_dot and scaled_ragged_wgrad: grouped products of quantised matrices, all K-major.

With rows(i) the rows of group i (_groups.py says which), per group the chain of _gemm.py:

    scaled_ragged_dot    out[rows(i)] = lhs[rows(i)] . rhs[i]^T             1d2d
    scaled_ragged_wgrad  out[i]       = lhs[:, rows(i)] . rhs[:, rows(i)]^T 1d1d

A group's result has the bits of the ungrouped product of that group alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm import _checks, _groups
from jax_fp8gemm._gemm import OUT_DTYPES, reference
from jax_fp8gemm._primitive import constant_like, define_primitive, map_batch
from jax_fp8gemm._quantize import Implementation
from jax_fp8gemm._scaled_array import ScaledArray, check_scaled_array

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int

_BLOCK = _checks.SCALE_BLOCK


def scaled_ragged_dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: Int[Array, " g"],
    *,
    out_dtype: Any = jnp.bfloat16,
    implementation: Implementation = None,
) -> Float[Array, "m n"] | Float[Array, "g max_m n"]:
    """Multiplies each group of rows of lhs by the transpose of its own rhs[i].

    Args:
      lhs: (m, k) with scale blocks (1, 128), rows sorted by group; or (g, max_m, k), the masked
        form for decoding: group i is the first group_sizes[i] rows of lhs[i].
      rhs: (g, n, k) with scale blocks (128, 128).
      group_sizes: (g,) int32 or int64 on the device. A negative size counts as 0, rows past m (or
        max_m) as none.
      out_dtype: bfloat16 or float32.
      implementation: as for scaled_matmul.
    Returns:
      (m, n) or (g, max_m, n) array; rows of no group are zero, whatever lhs holds there. Not
      differentiable: jax_fp8gemm.ragged_dot is.
    Raises:
      ValueError: shapes, blocks or scales disagree. TypeError: a dtype.
    """
    op = "scaled_ragged_dot"
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        check_scaled_array(op, name, x)
    if lhs.ndim not in (2, 3):
        _checks.check_ndim(op, "lhs", lhs, 2, "(m, k) or (g, max_m, k)")
    _checks.check_ndim(op, "rhs", rhs, 3, "(g, n, k)")
    for name, x, block in (("lhs", lhs, (1, 128)), ("rhs", rhs, (128, 128))):
        if x.block != block:
            raise ValueError(f"{op}: {name}.block must be {block}; got {x.block}")
    _checks.check_same_k(op, lhs, lhs.shape[-1], rhs, rhs.shape[2])
    _checks.check_array(op, "group_sizes", group_sizes)
    _groups.check_group_sizes(op, group_sizes, rhs.shape[0])
    if lhs.ndim == 3 and lhs.shape[0] != rhs.shape[0]:
        raise ValueError(
            f"{op}: lhs (g, max_m, k) and rhs (g, n, k) must share g; "
            f"got lhs {_checks.short_type(lhs)}, rhs {_checks.short_type(rhs)}"
        )
    _checks.check_out_dtype(op, "out_dtype", out_dtype, OUT_DTYPES)
    _checks.check_implementation(op, implementation)
    first_row = jnp.zeros((1,), jnp.int32)
    return grouped_gemm(lhs, rhs, group_sizes, first_row, out_dtype, implementation)


@jax.named_scope("fp8gemm_grouped_gemm")
def grouped_gemm(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: jax.Array,
    first_row: jax.Array,
    out_dtype: Any,
    implementation: Implementation = None,
) -> jax.Array:
    """scaled_ragged_dot without the checks, for groups that start at first_row, int32 (1,)."""
    operands = (
        lhs.values,
        lhs.scale,
        rhs.values,
        rhs.scale,
        _groups.as_int32(group_sizes),
        first_row,
    )
    params = dict(out_dtype=jnp.dtype(out_dtype), implementation=implementation)
    return grouped_gemm_p(*map(jnp.asarray, operands), **params)[0]


def scaled_ragged_wgrad(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: Int[Array, " g"],
    *,
    out_dtype: Any = jnp.float32,
    accumulate_into: Float32[Array, "g m n"] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "g m n"]:
    """Contracts the tokens of each group: the weight gradient of a ragged dot.

    Args:
      lhs: (m, t) and rhs: (n, t), both of quantize_ragged with these group_sizes.
      group_sizes: (g,) int32 or int64 on the device, as quantize_ragged had them.
      out_dtype: float32 or bfloat16.
      accumulate_into: (g, m, n) f32 that the product is added to, with out_dtype float32.
      implementation: as for scaled_matmul.
    Returns:
      (g, m, n) array, zero (or accumulate_into) for an empty group. Not differentiable.
    Raises:
      ValueError: shapes, blocks or scales disagree. TypeError: a dtype.
    """
    op = "scaled_ragged_wgrad"
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        check_scaled_array(op, name, x)
        _checks.check_ndim(op, name, x, 2, f"({'m' if name == 'lhs' else 'n'}, t)")
        if x.block != (1, 128):
            raise ValueError(f"{op}: {name}.block must be (1, 128); got {x.block}")
    _check_tokens(op, lhs, rhs)
    _checks.check_array(op, "group_sizes", group_sizes)
    _groups.check_group_sizes(op, group_sizes)
    _checks.check_out_dtype(op, "out_dtype", out_dtype, OUT_DTYPES)
    _checks.check_implementation(op, implementation)
    if accumulate_into is not None:
        shape = (group_sizes.shape[0], lhs.shape[0], rhs.shape[0])
        _checks.check_accumulator(op, accumulate_into, shape, out_dtype)
    return grouped_wgrad(lhs, rhs, group_sizes, out_dtype, implementation, accumulate_into)


def _check_tokens(op: str, lhs: Any, rhs: Any) -> None:
    _checks.check_same_k(op, lhs, lhs.shape[1], rhs, rhs.shape[1])
    if lhs.shape[1] % _BLOCK:
        raise ValueError(
            f"{op}: t must be a multiple of 128; got lhs {_checks.short_type(lhs)}. "
            "Quantise with quantize_ragged, which fills up the last block of each group."
        )


@jax.named_scope("fp8gemm_grouped_wgrad")
def grouped_wgrad(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: jax.Array,
    out_dtype: Any,
    implementation: Implementation = None,
    accum: jax.Array | None = None,
) -> jax.Array:
    """scaled_ragged_wgrad without the checks."""
    operands = [lhs.values, lhs.scale, rhs.values, rhs.scale, _groups.as_int32(group_sizes)]
    operands += [] if accum is None else [accum]
    params = dict(out_dtype=jnp.dtype(out_dtype), implementation=implementation)
    return grouped_wgrad_p(*map(jnp.asarray, operands), **params)[0]


def _gemm_shape_rule(lhs, lhs_scale, rhs, rhs_scale, group_sizes, first_row, *, out_dtype):
    op = "grouped_gemm"
    _checks.check_ndim(op, "rhs", rhs, 3, "(g, n, k)")
    _checks.check_scaled(op, "lhs", lhs, lhs_scale, (1, _BLOCK))
    _checks.check_scaled(op, "rhs", rhs, rhs_scale, (_BLOCK, _BLOCK))
    _checks.check_same_k(op, lhs, lhs.shape[-1], rhs, rhs.shape[2])
    _groups.check_group_sizes(op, group_sizes, rhs.shape[0])
    return [jax.ShapeDtypeStruct((*lhs.shape[:-1], rhs.shape[1]), out_dtype)]


def _gemm_reference(lhs, lhs_scale, rhs, rhs_scale, group_sizes, first_row, *, out_dtype):
    if lhs.ndim == 3:
        one = lambda xs: _gemm_reference(*xs, first_row=first_row, out_dtype=out_dtype)[0]
        return [
            lax.map(one, (lhs, lhs_scale, rhs[:, None], rhs_scale[:, None], group_sizes[:, None]))
        ]
    (m, _), (g, n, _) = lhs.shape, rhs.shape
    group = _groups.group_of_rows(group_sizes, first_row, m)[:, None]

    def add_group(out, xs):
        # All rows times this group's matrix, of which its own are kept: what the others hold, or
        # what the matrices of other groups hold, NaN too, reaches nothing.
        i, weights, scale = xs
        (product,) = reference(
            lhs, lhs_scale, weights, scale, is_1d1d=False, out_dtype=jnp.dtype(jnp.float32)
        )
        return jnp.where(group == i, product, out), None

    out = constant_like(lhs, jnp.zeros((m, n), jnp.float32))
    out, _ = lax.scan(add_group, out, (jnp.arange(g, dtype=jnp.int32), rhs, rhs_scale))
    return [out.astype(out_dtype)]


def _wgrad_shape_rule(lhs, lhs_scale, rhs, rhs_scale, group_sizes, *accum, out_dtype):
    op = "grouped_wgrad"
    for name, x, scale in (("lhs", lhs, lhs_scale), ("rhs", rhs, rhs_scale)):
        _checks.check_ndim(op, name, x, 2, f"({'m' if name == 'lhs' else 'n'}, t)")
        _checks.check_scaled(op, name, x, scale, (1, _BLOCK))
    _check_tokens(op, lhs, rhs)
    _groups.check_group_sizes(op, group_sizes)
    shape = (group_sizes.shape[0], lhs.shape[0], rhs.shape[0])
    for accum_aval in accum:
        _checks.check_accumulator(op, accum_aval, shape, out_dtype)
    return [jax.ShapeDtypeStruct(shape, out_dtype)]


def _wgrad_reference(lhs, lhs_scale, rhs, rhs_scale, group_sizes, *accum, out_dtype):
    (m, t), n, (g,) = lhs.shape, rhs.shape[0], group_sizes.shape
    num_blocks = t // _BLOCK
    blocks = jnp.clip((jnp.clip(group_sizes, 0, t) + _BLOCK - 1) // _BLOCK, 0, num_blocks)
    ends = jnp.minimum(jnp.cumsum(blocks), num_blocks)
    group = jnp.searchsorted(ends, jnp.arange(num_blocks, dtype=jnp.int32), side="right")
    lhs, rhs = lax.optimization_barrier((lhs, rhs))

    def promote(promoted, b):
        block = lambda x: lax.dynamic_slice_in_dim(x, b * _BLOCK, _BLOCK, 1).astype(jnp.float32)
        partial = lax.dot_general(block(lhs), block(rhs), (((1,), (1,)), ((), ())))
        column = lambda scale: lax.dynamic_index_in_dim(scale, b, 1, keepdims=False)
        scaled = column(lhs_scale)[:, None] * column(rhs_scale)[None] * partial
        # mode="drop": blocks behind the last group have index g.
        return promoted.at[group[b]].add(scaled, mode="drop"), None

    promoted = constant_like(lhs, jnp.zeros((g, m, n), jnp.float32))
    if num_blocks > 0:
        promoted, _ = lax.scan(promote, promoted, jnp.arange(num_blocks, dtype=jnp.int32))
    for x in accum:
        promoted = x + promoted
    return [promoted.astype(out_dtype)]


def _batch_rule(primitive):
    """One batch element after another: each has groups of its own."""

    def rule(operands, dims, **params):
        return map_batch(lambda *xs: primitive()(*xs, **params), operands, dims), [0]

    return rule


grouped_gemm_p = define_primitive(
    "jax_fp8gemm_grouped_gemm",
    shape_rule=_gemm_shape_rule,
    reference=_gemm_reference,
    ffi_call=None,
    batch_rule=_batch_rule(lambda: grouped_gemm_p),
)

grouped_wgrad_p = define_primitive(
    "jax_fp8gemm_grouped_wgrad",
    shape_rule=_wgrad_shape_rule,
    reference=_wgrad_reference,
    ffi_call=None,
    batch_rule=_batch_rule(lambda: grouped_wgrad_p),
)
