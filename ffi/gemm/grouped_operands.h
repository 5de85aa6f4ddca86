// What the products of groups of rows share: their operands, as FFI calls have them, and the
// launch.

#ifndef JAX_FP8GEMM_GEMM_GROUPED_OPERANDS_H_
#define JAX_FP8GEMM_GEMM_GROUPED_OPERANDS_H_

#include <cstddef>
#include <cstdint>

#include "driver/driver.h"
#include "errors.h"
#include "gemm/gemm_config.h"
#include "gemm/gemm_launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// grouped_gemm.h says what each is. next_tile is a result.
struct GroupedOperands {
  const ffi::AnyBuffer& lhs;
  const ffi::AnyBuffer& lhs_scale;
  const ffi::AnyBuffer& rhs;
  const ffi::AnyBuffer& rhs_scale;
  const ffi::AnyBuffer& group_sizes;
  const ffi::AnyBuffer& first_row;
  const ffi::AnyBuffer& next_tile;
};

// InvalidArgument unless the operands, whose extents CheckGroupedExtents has checked, are those of
// a product (m, n), and its tiles can be counted.
ffi::Error CheckGroupedOperands(const char* op, const GemmConfig& config,
                                const GroupedOperands& operands, int64_t n);

// Returns the parameters of that product. `out` is its result, or what is stored in its place.
GemmParams GroupedParams(const GemmConfig& config, const GroupedOperands& operands,
                         const ffi::AnyBuffer& out, int64_t n);

// Sets `count` words to zero.
ffi::Error Clear(void* words, size_t count, CUstream stream);

// Launches the kernel of that product. next_tile must be clear.
ffi::Error LaunchGrouped(const GemmConfig& config, const GroupedOperands& operands,
                         const GemmParams& params, CUstream stream);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_GROUPED_OPERANDS_H_
