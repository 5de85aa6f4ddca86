// The kernel of row_copier.cuh. Its name is JAX_FP8GEMM_KERNEL, which differs for each config.
#pragma once

#include "copy_rows/row_copier.cuh"

extern "C" __global__ void __launch_bounds__(jax_fp8gemm::RowCopier<Config>::kNumThreads,
                                             jax_fp8gemm::RowCopier<Config>::kMinCtas)
    JAX_FP8GEMM_KERNEL(const __grid_constant__ jax_fp8gemm::CopyRowsParams params) {
  using Copier = jax_fp8gemm::RowCopier<Config>;
  const unsigned warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
  const Copier copier{params, static_cast<int>(threadIdx.x % 32)};
  copier.run(blockIdx.x * Copier::kNumWarps + warp);
}
