// The parameters of a kernel that adds rows, from the operands and the result of a call.

#ifndef JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_PARAMS_H_
#define JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_PARAMS_H_

#include <cstdint>

#include "sum_rows/sum_rows_config.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Mirrors SumRowsParams in cuda/sum_rows/sum_rows_params.cuh.
struct SumRowsParams {
  const void* rows;
  const void* places;
  const void* weights;
  void* sums;
  int32_t num_sums, num_places;
  int32_t m, k;
};

// Bytes of a row of sums that one warp takes, and warps of a CTA; must agree with RowAdder in
// cuda/sum_rows/row_adder.cuh.
constexpr int64_t kSumPieceBytes = 2048;
constexpr int64_t kSumWarps = 4;

// The kernel's parameters, after a check of every operand and of the result.
ffi::ErrorOr<SumRowsParams> BindSumRowsParams(const SumRowsConfig& config,
                                              const ffi::AnyBuffer& rows,
                                              const ffi::AnyBuffer& places,
                                              const ffi::AnyBuffer& weights,
                                              const ffi::AnyBuffer& sums);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_PARAMS_H_
