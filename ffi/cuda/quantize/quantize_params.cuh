// The mode and the parameters of a quantise kernel: its operands and results, for one matrix or a
// batch.
#pragma once

#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

enum Mode {
  kRow = 0,
  kColumn = 1,
  kRowColumn = 2,
  kBlock = 3,
  kBlockTransposed = 4,
  kBlockBoth = 5,
  kRowBlockTransposed = 6
};

struct QuantizeParams {
  const uint8_t* x;   // gate_up of SwiGLU
  const uint8_t* dh;  // the gradient of SwiGLU
  uint8_t* values;
  float* scale;
  uint8_t* transposed;
  float* transposed_scale;
  int m, k;          // of what is quantised
  int num_m_blocks;  // tiles down the rows; mode "row": unset
  // Ragged.
  int num_columns, num_groups;
  const int* group_sizes;
  const int* first_row;
  // Gathered: what makes the rows out of x (num_sources, k).
  int num_sources;
  const float* x_scale;  // of an FP8 x: [k/128][num_sources]
  const int* rows;
  const float* weights;  // of the weighted gradient of SwiGLU too
  float* dots;           // of that gradient: [k/256][m]
};

// Returns the operands and results of one element of a batch of square-block quantisations.
// NOTE: other modes get the launch's own parameters, since a copy makes ptxas spill.
template <typename Quantizer>
__device__ __forceinline__ decltype(auto) batch_element(const QuantizeParams& launched, int index) {
  if constexpr (!Quantizer::kHasBatch) {
    return (launched);
  } else {
    constexpr int kScaleBlock = Quantizer::kScaleBlock;
    QuantizeParams params = launched;
    const int64_t num_values = static_cast<int64_t>(params.m) * params.k * index;
    const auto num_stored = [&](int rows, int columns) {
      if constexpr (!Quantizer::kIsPadded) return num_values;
      return static_cast<int64_t>(rows) * Quantizer::row_pitch(columns) * index;
    };
    const int64_t num_scales = static_cast<int64_t>(ceil_div(params.m, kScaleBlock)) *
                               ceil_div(params.k, kScaleBlock) * index;
    params.x += num_values * Quantizer::Elements::kElemBytes;
    params.values += num_stored(params.m, params.k);
    params.transposed += num_stored(params.k, params.m);
    params.scale += num_scales;
    params.transposed_scale += num_scales;
    return params;
  }
}

}  // namespace jax_fp8gemm
