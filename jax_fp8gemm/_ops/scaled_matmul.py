"""scaled_matmul: the product of two quantised matrices, both K-major (_primitives/gemm.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array
from jax_fp8gemm._ops.scaled_checks import check_block, check_result
from jax_fp8gemm._primitives.gemm import gemm

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32


@naming_devices
def scaled_matmul(
    lhs: ScaledArray,
    rhs: ScaledArray,
    *,
    out_dtype: Any = jnp.bfloat16,
    accumulate_into: Float32[Array, "m n"] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "m n"]:
    """Multiplies quantised lhs (m, k) by the transpose of quantised rhs (n, k).

    Args:
      lhs: (m, k) with scale blocks (1, 128); e4m3fn or e5m2.
      rhs: (n, k) with scale blocks (128, 128) or (1, 128); e4m3fn or e5m2.
      out_dtype: bfloat16 or float32.
      accumulate_into: (m, n) f32 that the product is added to, with out_dtype float32. Its buffer
        becomes the result's where XLA can (donate it under jit).
      implementation: None, the kernel where it can run and the reference elsewhere, with one
        warning; "cuda", the kernel or an error; "xla", the reference.
    Returns:
      (m, n) array of out_dtype. Not differentiable: jax_fp8gemm.matmul is. Sharded over Explicit
      mesh axes as lhs is in m and rhs in n; summed over those that k is sharded over.
    Raises:
      ValueError: shapes, blocks or scales disagree, implementation. TypeError: a dtype.
      RuntimeError: implementation="cuda" where the kernel cannot run.
    """
    op = "scaled_matmul"
    lhs, rhs, accumulate_into = map(arrays.as_array, (lhs, rhs, accumulate_into))
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        check_scaled_array(op, name, x)
        hint = "Map leading dimensions with jax.vmap."
        checks.check_ndim(op, name, x, 2, f"({'m' if name == 'lhs' else 'n'}, k)", hint=hint)
    check_block(op, "lhs", lhs, (1, 128))
    checks.check_same_k(op, lhs, lhs.shape[1], rhs, rhs.shape[1])
    shape = lhs.shape[0], rhs.shape[0]
    out_dtype = check_result(op, shape, out_dtype, implementation, accumulate_into)
    return gemm(lhs, rhs, out_dtype, implementation, accumulate_into)
