// The FFI targets jax_fp8gemm_grouped_gemm and jax_fp8gemm_grouped_wgrad; see cuda/groups.cuh for
// what group_sizes means.
//
// grouped_gemm: each group of rows of lhs times its own rhs, 1d2d. Operands:
//   lhs          (m, k)            e4m3fn or e5m2; groups follow each other, or have
//                                  `rows_per_group` rows each (attribute; 0: they follow)
//   lhs_scale    (m, k/128)        f32, [k/128][m] in memory
//   rhs          (g n, k)          e4m3fn or e5m2
//   rhs_scale    (g n/128, k/128)  f32, row-major; n/128 rounded up for each group
//   group_sizes  (g)               s32, any values
//   first_row    (1)               s32, any value
// Results: out (m, n), bf16 or f32; next_tile (1), s32, what the kernel counts its tiles in.
//
// grouped_wgrad: the contraction over the columns of each group, 1d1d. Operands:
//   lhs          (m, t)            e4m3fn or e5m2; groups start at multiples of 128
//   lhs_scale    (m, t/128)        f32, [t/128][m] in memory
//   rhs          (n, t)            e4m3fn or e5m2
//   rhs_scale    (n, t/128)        f32, [t/128][n] in memory
//   group_sizes  (g)               s32, any values
//   accum        (g m, n)          f32, only if accumulate; shares its buffer with out
// Result: out (g m, n), bf16 or f32.
//
// Limits as for jax_fp8gemm_gemm, and 1 to 1024 groups. Whatever the sizes, the kernels stay inside
// their buffers.

#ifndef JAX_FP8GEMM_GROUPED_GEMM_H_
#define JAX_FP8GEMM_GROUPED_GEMM_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGemmInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGemmPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGemmExecuteHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedWgradInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedWgradPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedWgradExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GROUPED_GEMM_H_
