// The parameters of row_copier.cuh, as the launch passes them.
#pragma once

#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

struct CopyRowsParams {
  const uint8_t* x;             // (s, k) FP8
  const float* x_scale;         // [s][k/128]
  const int* places;            // (s, c): the rows of `values` that are copies of a row of x
  uint8_t* values;              // (m, k)
  float* scale;                 // [k/128][m]
  int num_sources, num_copies;  // s, c
  int m, k;
};

}  // namespace jax_fp8gemm
