// The FFI targets jax_fp8gemm_quantize, jax_fp8gemm_swiglu_quantize,
// jax_fp8gemm_swiglu_grad_quantize, jax_fp8gemm_weighted_swiglu_grad_quantize and
// jax_fp8gemm_gather_quantize: to FP8 with f32 scales. One set of handlers serves them all, as
// config.source says; see cuda/quantize/quantize.cuh for the results of each mode, and
// swiglu_source.cuh and gather_source.cuh beside it for what is quantised.
//
// Operands, row-major:
//   quantize              x (m, k)
//   swiglu_quantize       gate_up (m, 2 k)
//   swiglu_grad_quantize  gate_up (m, k), dh (m, k/2); k is even
//   weighted_swiglu_grad_quantize  the same, and weights (m) f32; ragged only
//   gather_quantize       x (s, k), x_scale (s, k/128) f32 with its first dimension minor if x is
//                         FP8, rows (m) s32 of any values, weights (m) f32 if weighted
// bf16, f16 or f32 unless said otherwise, with 1 <= m, k <= 2^30; weighted_swiglu_grad_quantize
// takes no f16. Results, in order:
//   row               values (m, k), scale (m, k/128)
//   column            values (k, m), scale (k, m/128)
//   row_column        those four
//   block             values (m, k), scale (m/128, k/128)
//   block_transposed  values (k, m), scale (k/128, m/128)
//   block_both        values (m, k), values (k, m), scale (m/128, k/128)
//   row_block_transposed  the results of row, then those of block_transposed
// with fractions rounded up; weighted_swiglu_grad_quantize has dots (k/2/128, m) f32 behind these
// (cuda/quantize/swiglu_weights.cuh). Layouts are row-major, except that the scale of "row" and
// "column" has its first dimension minor: [k/128][m] and [m/128][k] in memory. Buffers start at
// multiples of 16 bytes; results of an empty first operand must be empty, and nothing runs. block,
// block_transposed and block_both take x (b, m, k) too, b <= 65535: every result then has b in
// front.
//
// Ragged: more operands, group_sizes (g) and first_row (1), s32 of any values; 1 <= g <= 1024. The
// columns of the transposed results are then (m + 127 g) / 128 * 128 instead of m. There is no
// batch, block or block_both. All but "quantize" have columns in this form only. Of SwiGLU and its
// gradient, rows of no group are not stored, and row is ragged too: then rows behind the last group
// are not stored.

#ifndef JAX_FP8GEMM_QUANTIZE_QUANTIZE_H_
#define JAX_FP8GEMM_QUANTIZE_QUANTIZE_H_

#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeInstantiateHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizePrepareHandler);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeExecuteHandler);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_QUANTIZE_QUANTIZE_H_
