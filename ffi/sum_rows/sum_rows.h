// The FFI target jax_fp8gemm_sum_rows: weighted sums of numbered rows, a sum for each token; see
// cuda/sum_rows/row_adder.cuh.
//
// Operands, row-major:
//   rows (m, k)     bf16, f16 or f32
//   places (s, c)   s32 of any values
//   weights (s, c)  f32
// Result:
//   sums (s, k)     of the dtype of rows, row-major
// with s, m, k, c <= 2^30, and less than 2^31 pieces of 2048 bytes of rows of sums. k is a multiple
// of the elements of config.word_bytes. Buffers start at multiples of 16 bytes.

#ifndef JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_H_
#define JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(SumRowsInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SumRowsPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SumRowsExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_H_
