// The parameters of a kernel that copies rows, from the operands and results of a call.

#ifndef JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_PARAMS_H_
#define JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_PARAMS_H_

#include <cstdint>

#include "copy_rows/copy_rows_config.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Mirrors CopyRowsParams in cuda/copy_rows/copy_rows_params.cuh.
struct CopyRowsParams {
  const void* x;
  const void* x_scale;
  const void* places;
  void* values;
  void* scale;
  int32_t num_sources, num_copies;
  int32_t m, k;
};

// Bytes of a row of x that one warp takes, and warps of a CTA; must agree with RowCopier in
// cuda/copy_rows/row_copier.cuh.
constexpr int64_t kPieceBytes = 2048;
constexpr int64_t kCopyWarps = 8;

// The kernel's parameters, after a check of every operand and result.
ffi::ErrorOr<CopyRowsParams> BindCopyRowsParams(
    const CopyRowsConfig& config, const ffi::AnyBuffer& x, const ffi::AnyBuffer& x_scale,
    const ffi::AnyBuffer& places, const ffi::AnyBuffer& values, const ffi::AnyBuffer& scale);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_PARAMS_H_
