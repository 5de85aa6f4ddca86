// What the extents of a grouped product must be, whatever its groups cut.

#ifndef JAX_FP8GEMM_GEMM_GROUPED_EXTENTS_H_
#define JAX_FP8GEMM_GEMM_GROUPED_EXTENTS_H_

#include <cstdint>

#include "errors.h"
#include "gemm/gemm_config.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// InvalidArgument unless a kernel can be built from the config and its groups cut what `grouping`
// says, lhs, rhs and out are matrices, group_sizes a vector of 1 to 1024 groups, and all extents
// are what the kernel can index.
ffi::Error CheckGroupedExtents(const char* op, const GemmConfig& config, Grouping grouping,
                               const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& rhs,
                               const ffi::AnyBuffer& group_sizes, const ffi::AnyBuffer& out);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_GROUPED_EXTENTS_H_
