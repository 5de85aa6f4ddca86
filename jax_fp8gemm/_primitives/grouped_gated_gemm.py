"""grouped_gated_gemm_p: quantises h = act(gate) * up where the product [gate | up] is computed.

For lhs (m, k) and rhs (g, 2 f, k), with rows(i) the rows of group i:

    gate_up[rows(i)] = lhs[rows(i)] . rhs[i]^T     as grouped_gemm.py, rounded to bf16
    h                = act(gate) * up              as swiglu_quantize.py, quantised along f

The bits are those of the two primitives one after another, in each implementation. gate_up is not
stored. A forward pass alone can do without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.rounding import block_types
from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm._primitives import grouped_gemm
from jax_fp8gemm._primitives.gemm import twins_of_rhs
from jax_fp8gemm._primitives.joint import define_joint_primitive
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs
from jax_fp8gemm._primitives.swiglu_quantize import swiglu_quantize_p
from jax_fp8gemm._runtime import extension, hopper
from jax_fp8gemm._tuning import choose, gated_config, tile_config
from jax_fp8gemm._tuning.tile import operand_formats

_OP = "grouped_gated_gemm"
_BLOCK = formats.SCALE_BLOCK
# Of a group, if all have as many. Groups of 256 rows were the shortest that were timed.
_LEAST_ROWS = 256


def is_faster(m: Any, k: Any, f: Any, num_groups: int) -> bool:
    """Returns whether this primitive is the faster way to h, and can compute it.

    That is so where gate_up alone would be computed in tiles of 128x256, and groups fill them.
    Nobody knows where an extent is symbolic.
    """
    if not all(isinstance(extent, int) and extent > 0 for extent in (m, k, f)):
        return False
    if f % _BLOCK or m < _LEAST_ROWS * num_groups:
        return False
    kernel: dict[str, Any] = dict(is_1d1d=False, out_f32=False, accumulate=False)
    chosen = choose.choose(m, 2 * f, k, num_groups, **kernel, num_sms=hopper.NUM_SMS)
    return chosen == tile_config.TILE_128X256


@jax.named_scope("fp8gemm_grouped_gated_gemm")
def grouped_gated_gemm(
    lhs: ScaledArray,
    rhs: ScaledArray,
    group_sizes: jax.Array,
    first_row: jax.Array,
    *,
    activation: Activation,
    reduce_dtype: Any = jnp.float32,
    **args: Unpack[QuantizeArgs],
) -> ScaledArray:
    """Returns h (m, f), quantised along its rows.

    Args:
      lhs: (m, k), block (1, 128).
      rhs: (g, 2 f, k), block (128, 128), gate | up. f is a multiple of 128.
      group_sizes: (g,) int32. first_row: (1,) int32, the row at which the first group starts.
      activation: that of gated.py.
      reduce_dtype: as for grouped_gemm. The kernel has no partial sums.
      args: the FP8 dtype of h, pow2_scale and the implementation.
    On a GPU a row of no group may hold anything, NaN too.
    """
    operands = *values_and_scale(lhs), *values_and_scale(rhs), group_sizes, first_row
    values, scale = grouped_gated_gemm_p(
        *operands,
        twins=twins_of_rhs(rhs),
        activation=activation,
        reduce_dtype=jnp.dtype(reduce_dtype),
        e5m2=jnp.dtype(args["dtype"]) == jnp.float8_e5m2,
        pow2_scale=bool(args["pow2_scale"]),
        implementation=args["implementation"],
    )
    return ScaledArray(values, scale, None, (1, _BLOCK))


def _shape_rule(lhs, lhs_scale, rhs, rhs_scale, group_sizes, first_row, *, e5m2: bool, **params):
    operands = lhs, lhs_scale, rhs, rhs_scale, group_sizes, first_row
    checks.check_ndim(_OP, "lhs", lhs, 2, "(m, k)")
    (gate_up,) = grouped_gemm.shape_rule(*operands, **_PRODUCT)
    m, n = gate_up.shape
    if n % (2 * _BLOCK):
        raise ValueError(
            f"{_OP}: rhs must be (g, 2 f, k) with f a multiple of {_BLOCK}; "
            f"got rhs {checks.short_type(rhs)}"
        )
    return block_types(m, n // 2, 1, e5m2)


# How grouped_gemm computes gate_up.
_PRODUCT: dict[str, Any] = dict(
    out_dtype=jnp.dtype(jnp.bfloat16), unused_rows="zero", expected_rows=None, spare_sms=0
)


def apart(
    *operands,
    implementation,
    activation: Activation,
    reduce_dtype: Any,
    e5m2: bool,
    pow2_scale: bool,
    twins: Mapping[int, jax.Array] = MappingProxyType({}),
):
    """Computes h by two primitives."""
    how: dict[str, Any] = dict(reduce_dtype=reduce_dtype, implementation=implementation)
    how |= _PRODUCT | dict(unused_rows="undefined")
    (gate_up,) = grouped_gemm.grouped_gemm_p(*operands, twins=twins, **how)
    return swiglu_quantize_p(
        gate_up,
        *operands[-2:],
        mode="row",
        e5m2=e5m2,
        pow2_scale=pow2_scale,
        activation=activation,
        pieces=1,
        implementation=implementation,
    )


def _ffi_call(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
    group_sizes,
    first_row,
    *,
    activation: Activation,
    reduce_dtype: Any,
    e5m2: bool,
    pow2_scale: bool,
):
    """Calls the kernel. It needs k % 16 == 0, so operands are padded with zeros."""
    (m, k), (_, n, _) = lhs.shape, rhs.shape
    pad_k = -k % 16
    if pad_k:
        lhs, rhs = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad_k)]) for x in (lhs, rhs))
    rhs, rhs_scale = (x.reshape(-1, x.shape[-1]) for x in (rhs, rhs_scale))
    of_h: dict[str, Any] = dict(e5m2=e5m2, pow2_scale=pow2_scale, activation=activation)
    config = gated_config.attributes(extension.num_sms(), **operand_formats(lhs, rhs), **of_h)
    row_major, column_major, vector = (0, 1), (1, 0), (0,)
    next_tile = jax.ShapeDtypeStruct((1,), jnp.int32)  # the kernel counts tiles in it
    values, scale, _ = jax.ffi.ffi_call(
        extension.GROUPED_GATED_GEMM_TARGET,
        (*block_types(m, n // 2, 1, e5m2), next_tile),
        input_layouts=[row_major, column_major, row_major, row_major, vector, vector],
        output_layouts=[row_major, column_major, vector],
    )(lhs, lhs_scale, rhs, rhs_scale, group_sizes.astype(jnp.int32), first_row, config=config)
    return [values, scale]


grouped_gated_gemm_p = define_joint_primitive(
    "jax_fp8gemm_grouped_gated_gemm", _shape_rule, _ffi_call, apart
)
