// The kernel of row_adder.cuh. Its name is JAX_FP8GEMM_KERNEL, which differs for each config.
#pragma once

#include "sum_rows/row_adder.cuh"

extern "C" __global__ void __launch_bounds__(jax_fp8gemm::RowAdder<Config>::kNumThreads,
                                             jax_fp8gemm::RowAdder<Config>::kMinCtas)
    JAX_FP8GEMM_KERNEL(const __grid_constant__ jax_fp8gemm::SumRowsParams params) {
  using Adder = jax_fp8gemm::RowAdder<Config>;
  const unsigned warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
  const Adder adder{params, static_cast<int>(threadIdx.x % 32)};
  adder.run(blockIdx.x * Adder::kNumWarps + warp);
}
