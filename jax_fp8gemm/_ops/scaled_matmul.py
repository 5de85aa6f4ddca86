"""scaled_matmul: multiplies two quantised matrices, both K-major (_primitives/gemm.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray, without_twin
from jax_fp8gemm._ops.scaled_checks import check_block, check_matrices, check_result
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
    split_k: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "m n"]:
    """Multiplies quantised lhs (m, k) by the transpose of quantised rhs (n, k).

    It is not differentiable; jax_fp8gemm.matmul is. The scaling is that of the DeepSeek-V3 report,
    section 3.3.2.

    Args:
      lhs: (m, k) with scale blocks (1, 128), float8_e4m3fn or float8_e5m2.
      rhs: (n, k) with scale blocks (128, 128) or (1, 128), float8_e4m3fn or float8_e5m2.
      out_dtype: bfloat16 or float32.
      accumulate_into: (m, n) f32 that the product is added to; out_dtype must be float32. XLA
        reuses its buffer for the result where it can. Donate it under jit.
      split_k: whether a product of up to 64 rows, 1024 columns and a long contraction may be added
        up in parts, as with Recipe(split_k=True). It is faster, and has other bits.
      implementation: None runs the kernel where it can run, and elsewhere the reference, with one
        warning. "cuda" runs the kernel or raises. "xla" runs the reference.
        "emulate" gives the bits of the kernel on any machine, slowly.
    Returns:
      (m, n) array of out_dtype. Explicit mesh axes cut it like lhs in m and rhs in n. The sum runs
      over the axes that cut k.
    Raises:
      ValueError: shapes, blocks or scales disagree, or implementation is wrong.
      TypeError: a dtype is wrong, or split_k is no bool.
      RuntimeError: implementation="cuda", and the kernel cannot run.
    """
    op = "scaled_matmul"
    lhs, rhs, accumulate_into = map(arrays.as_array, (lhs, rhs, accumulate_into))
    check_matrices(op, lhs, rhs, "k", hint="Map leading dimensions with jax.vmap.")
    check_block(op, "lhs", lhs, (1, 128))
    checks.check_same_k(op, lhs, lhs.shape[1], rhs, rhs.shape[1])
    shape = lhs.shape[0], rhs.shape[0]
    out_dtype = check_result(op, shape, out_dtype, implementation, accumulate_into)
    checks.check_bool(op, split_k=split_k)
    rhs, split_k = without_twin(rhs), bool(split_k)
    return gemm(lhs, rhs, out_dtype, implementation, accumulate_into, split_k=split_k)
