"""scaled_ragged_wgrad: contracts the tokens of each group (_primitives/grouped_wgrad.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks, groups
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.scaled_checks import check_block, check_matrices, check_result
from jax_fp8gemm._primitives.grouped_wgrad import check_tokens, grouped_wgrad

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int


@naming_devices
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

    It is not differentiable. The scaling is that of the DeepSeek-V3 report, section 3.3.2.

    Args:
      lhs: (m, t) and rhs: (n, t), both quantised by quantize_ragged with these group_sizes.
      group_sizes: (g,) integers, which stay on the device: those that quantize_ragged had.
      out_dtype: float32 or bfloat16.
      accumulate_into: (g, m, n) f32 that the product is added to; out_dtype must be float32.
      implementation: as for scaled_matmul.
    Returns:
      (g, m, n) array of out_dtype, zero (or accumulate_into) for an empty group. Explicit mesh axes
      cut it like lhs in m, rhs in n and accumulate_into in g.
    Raises:
      ValueError: shapes, blocks or scales disagree, or implementation is wrong.
      TypeError: a dtype is wrong.
      RuntimeError: implementation="cuda", and the kernel cannot run.
    """
    op = "scaled_ragged_wgrad"
    operands = map(arrays.as_array, (lhs, rhs, group_sizes, accumulate_into))
    lhs, rhs, group_sizes, accumulate_into = operands
    check_matrices(op, lhs, rhs, "t")
    check_block(op, "lhs", lhs, (1, 128))
    check_block(op, "rhs", rhs, (1, 128))
    check_tokens(op, lhs, rhs)
    checks.check_array(op, "group_sizes", group_sizes)
    groups.check_group_sizes(op, group_sizes)
    checks.check_count(op, "t", lhs.shape[1], lhs)
    shape = group_sizes.shape[0], lhs.shape[0], rhs.shape[0]
    out_dtype = check_result(op, shape, out_dtype, implementation, accumulate_into)
    return grouped_wgrad(lhs, rhs, group_sizes, out_dtype, implementation, accumulate_into)
