// The FFI target jax_fp8gemm_quantizing_gemm: the product of jax_fp8gemm_gemm (gemm.h) for few rows
// of lhs in bf16, which the kernel quantises as jax_fp8gemm_quantize does, along k; see
// cuda/gemm/lhs_rows.cuh.
//
// Operands:
//   lhs        (m, k)                 bf16
//   rhs        (n, k)                 e4m3fn or e5m2
//   rhs_scale  (ceil(n/128), k/128)   f32
// Result:
//   out        (m, n)                 bf16 or f32
// The k of lhs and that of rhs may differ within their last k-block.
//
// Limits: m is at most 8; k of lhs is a multiple of 8, and that of rhs of 16; out has up to 7
// columns more than rhs has rows, a multiple of 8; and those of jax_fp8gemm_gemm.

#ifndef JAX_FP8GEMM_GEMM_QUANTIZING_GEMM_H_
#define JAX_FP8GEMM_GEMM_QUANTIZING_GEMM_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizingGemmInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizingGemmPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizingGemmExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_QUANTIZING_GEMM_H_
