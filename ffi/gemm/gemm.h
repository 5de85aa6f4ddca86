// The FFI target jax_fp8gemm_gemm: the product of two FP8 matrices with f32 scales; see
// cuda/gemm/gemm.cuh for the sum that it forms.
//
// Operands, with fractions rounded up:
//   lhs        (m, k)        e4m3fn or e5m2
//   lhs_scale  (m, k/128)    f32, [k/128][m] in memory
//   rhs        (n, k)        e4m3fn or e5m2
//   rhs_scale  1d2d (n/128, k/128) f32, row-major; 1d1d (n, k/128) f32, [k/128][n] in memory
//   accum      as out        f32, only if accumulate; shares its buffer with out
// Result: out (m, n), bf16 or f32; with transpose_out (n, m). Other layouts are row-major.
//
// The k of lhs and that of rhs are multiples of 16, and may differ within their last k-block. A row
// of out has a multiple of 8 elements. So in 1d2d out has up to 7 columns more than rhs has rows;
// elsewhere n, or with transpose_out m, is such a multiple. None of m, n, k is 0 or above 2^30.
// Buffers start at multiples of 16 bytes.

#ifndef JAX_FP8GEMM_GEMM_GEMM_H_
#define JAX_FP8GEMM_GEMM_GEMM_H_

#include "gemm/gemm_config.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_GEMM_H_
