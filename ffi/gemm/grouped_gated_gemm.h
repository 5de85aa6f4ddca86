// The FFI target jax_fp8gemm_grouped_gated_gemm: h = act(gate) * up of the product [gate | up] of
// jax_fp8gemm_grouped_gemm, quantised with 1x128 blocks; see cuda/gemm/gated_epilogue.cuh.
//
// Operands: those of jax_fp8gemm_grouped_gemm (grouped_gemm.h), whose groups follow each other.
// Results, with n = 2 f:
//   h          (m, f)      e4m3fn or e5m2
//   h_scale    (m, f/128)  f32, [f/128][m] in memory
//   next_tile  (1)         s32, what the kernel counts its tiles in
// Rows of no group stay as they are in memory.
//
// Limits: f is a multiple of 128; and those of jax_fp8gemm_grouped_gemm.

#ifndef JAX_FP8GEMM_GEMM_GROUPED_GATED_GEMM_H_
#define JAX_FP8GEMM_GEMM_GROUPED_GATED_GEMM_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGatedGemmInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGatedGemmPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GroupedGatedGemmExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_GROUPED_GATED_GEMM_H_
