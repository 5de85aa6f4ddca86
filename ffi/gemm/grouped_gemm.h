// The FFI target jax_fp8gemm_grouped_gemm: each group of rows of lhs times its own rhs, 1d2d; see
// cuda/groups.cuh for what group_sizes means.
//
// Operands:
//   lhs          (m, k)            e4m3fn or e5m2; groups follow each other, or have
//                                  `rows_per_group` rows each (attribute; 0: they follow)
//   lhs_scale    (m, k/128)        f32, [k/128][m] in memory
//   rhs          (g n, k)          e4m3fn or e5m2
//   rhs_scale    (g n/128, k/128)  f32, row-major; n/128 rounded up for each group
//   group_sizes  (g)               s32, any values
//   first_row    (1)               s32, any value
// Attribute clears_unused: what makes the rows of no group zeros: 0 nothing, so they stay as they
// are in memory; 1 the kernel, while it multiplies; 2 a fill before the kernel, of the whole of
// out, in the masked form alone. A fill is faster where the product waits for memory.
//
// Results: out (m, n), bf16 or f32; next_tile (1), s32, what the kernel counts its tiles in.
//
// Limits as for jax_fp8gemm_gemm, and 1 to 1024 groups. Whatever the sizes, the kernel stays inside
// its buffers.

#ifndef JAX_FP8GEMM_GEMM_GROUPED_GEMM_H_
#define JAX_FP8GEMM_GEMM_GROUPED_GEMM_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGemmInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGemmPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGemmExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_GROUPED_GEMM_H_
