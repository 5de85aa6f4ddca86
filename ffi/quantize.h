// The FFI target jax_fp8gemm_quantize: bf16, f16 or f32 to FP8 with f32 scales; see
// cuda/quantize.cuh for the results of each mode.
//
// Operand: x (m, k), 1 <= m, k <= 2^30, row-major. Results, in order:
//   row               values (m, k), scale (m, k/128)
//   column            values (k, m), scale (k, m/128)
//   row_column        those four
//   block             values (m, k), scale (m/128, k/128)
//   block_transposed  values (k, m), scale (k/128, m/128)
//   block_both        values (m, k), values (k, m), scale (m/128, k/128)
// with fractions rounded up. Layouts are row-major, except that the scale of "row" and "column"
// has its first dimension minor: [k/128][m] and [m/128][k] in memory. Buffers start at multiples of
// 16 bytes; a result of an empty x is empty and nothing runs.

//
// Ragged: more operands, group_sizes (g) and first_row (1), s32 of any values; 1 <= g <= 1024. The
// columns of the transposed results are then (m + 127 g) / 128 * 128 instead of m.

#ifndef JAX_FP8GEMM_QUANTIZE_H_
#define JAX_FP8GEMM_QUANTIZE_H_

#include <cstdint>

#include "jit.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// The attribute `config`: all that is compiled in.
struct QuantizeConfig {
  int32_t mode;        // 0..5, in the order above
  int32_t input;       // dtype of x: an index into kQuantizeInputs
  int32_t e5m2;        // values are e5m2, otherwise e4m3fn
  int32_t pow2_scale;  // scales are rounded up to powers of two
  int32_t ragged;      // column and row_column: every group of rows starts at a block of columns
};

constexpr ffi::DataType kQuantizeInputs[] = {ffi::DataType::BF16, ffi::DataType::F16,
                                             ffi::DataType::F32};

// The translation unit of a config with mode and input in range.
KernelSource QuantizeSource(const QuantizeConfig& config);

XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizePrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_QUANTIZE_H_
