// The parameters of a quantise kernel, from the operands and results of a call.

#ifndef JAX_FP8GEMM_QUANTIZE_QUANTIZE_PARAMS_H_
#define JAX_FP8GEMM_QUANTIZE_QUANTIZE_PARAMS_H_

#include <cstdint>

#include "quantize/quantize_config.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Mirrors QuantizeParams in cuda/quantize/quantize_params.cuh.
struct QuantizeParams {
  const void* x;   // gate_up of SwiGLU
  const void* dh;  // the gradient of SwiGLU
  void *values, *scale, *transposed, *transposed_scale;
  int32_t m, k;                     // of what is quantised
  int32_t num_m_blocks;             // tiles down the rows; mode "row": unset
  int32_t num_columns, num_groups;  // ragged
  const int32_t* group_sizes;
  const int32_t* first_row;
  int32_t num_sources;  // gathered
  const float* x_scale;
  const int32_t* rows;
  const float* weights;  // of the weighted gradient of SwiGLU too
  void* dots;            // of that gradient
};

// Rows of x that one warp takes; must agree with QuantizeWalk in cuda/quantize/quantize_walk.cuh.
constexpr int64_t kWarpRows = 16;

// Elements of a batch, which only square blocks can have.
int64_t QuantizeBatchSize(const ffi::AnyBuffer& x);

// The kernel's parameters, after a check of every operand and result. `more`: the operands behind
// the first one.
ffi::ErrorOr<QuantizeParams> BindQuantizeParams(const QuantizeConfig& config,
                                                const ffi::AnyBuffer& x,
                                                const ffi::RemainingArgs& more,
                                                const ffi::RemainingRets& results);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_QUANTIZE_QUANTIZE_PARAMS_H_
