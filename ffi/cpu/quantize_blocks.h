// The FFI target jax_fp8gemm_quantize_blocks, for a CPU: quantises the blocks of matrices. It is
// one operation where plain JAX takes dozens, and XLA compiles a program the longer the more
// operations it has. The bits are those of jax_fp8gemm/_data/rounding.py, which gives the formulas.
//
// Operand: x (..., m, k), bf16, f16 or f32. Results: values (..., r, c), e4m3fn or e5m2, and scale
// (..., r / block rows, c / 128), f32, with fractions rounded up. All are row-major.
//
// Attributes, booleans:
//   is_transposed  quantise the transpose of each matrix: (r, c) is (k, m); otherwise it is (m, k)
//   is_square      blocks have 128 rows; otherwise they have one. They have 128 columns
//   e5m2           the type of values
//   pow2_scale     scales are rounded up to powers of two

#ifndef JAX_FP8GEMM_CPU_QUANTIZE_BLOCKS_H_
#define JAX_FP8GEMM_CPU_QUANTIZE_BLOCKS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeBlocksHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_CPU_QUANTIZE_BLOCKS_H_
