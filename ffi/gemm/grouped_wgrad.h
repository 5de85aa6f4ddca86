// The FFI target jax_fp8gemm_grouped_wgrad: the contraction over the columns of each group; see
// cuda/groups.cuh for what group_sizes means.
//
// Operands:
//   lhs          (m, t)            e4m3fn or e5m2; groups start at multiples of 128
//   lhs_scale    (m, t/128)        f32, [t/128][m] in memory
//   rhs          (n, t)            e4m3fn or e5m2
//   rhs_scale    (n, t/128)        f32, [t/128][n] in memory; 1d2d: (n/128, t/128), row-major
//   group_sizes  (g)               s32, any values
//   accum        (g m, n)          f32, only if accumulate; shares its buffer with out
// Result: out (g m, n), bf16 or f32. If transpose_out, out and accum are (g n, m).
//
// Limits as for jax_fp8gemm_gemm, and 1 to 1024 groups. Whatever the sizes, the kernel stays inside
// its buffers.

#ifndef JAX_FP8GEMM_GEMM_GROUPED_WGRAD_H_
#define JAX_FP8GEMM_GEMM_GROUPED_WGRAD_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedWgradInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedWgradPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedWgradExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_GROUPED_WGRAD_H_
