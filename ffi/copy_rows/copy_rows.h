// The FFI target jax_fp8gemm_copy_rows: copies rows of FP8 values, with their scales, to numbered
// rows of the result; see cuda/copy_rows/row_copier.cuh.
//
// Operands, row-major:
//   x (s, k)            e4m3fn or e5m2
//   x_scale (s, k/128)  f32
//   places (s, c)       s32 of any values, but no two of them name the same row of the result
// Results:
//   values (m, k)       of the dtype of x, row-major
//   scale (m, k/128)    f32, with its first dimension minor: [k/128][m] in memory
// with fractions rounded up; s, m, k, c <= 2^30, and less than 2^31 pieces of 2048 bytes of rows of
// x. k is a multiple of config.word_bytes. Buffers start at multiples of 16 bytes. Nothing runs
// where there is nothing to copy, so results of no copy hold anything.

#ifndef JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_H_
#define JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(CopyRowsInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CopyRowsPrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CopyRowsExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_H_
