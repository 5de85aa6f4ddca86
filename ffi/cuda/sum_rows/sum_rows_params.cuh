// The parameters of row_adder.cuh, as the launch passes them.
#pragma once

#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

struct SumRowsParams {
  const uint8_t* rows;       // (m, k)
  const int* places;         // (s, c): the rows that a sum adds
  const float* weights;      // (s, c): their factors
  uint8_t* sums;             // (s, k)
  int num_sums, num_places;  // s, c
  int m, k;
};

}  // namespace jax_fp8gemm
