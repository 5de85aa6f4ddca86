// What the handlers of all products share: how their operands are bound, and the parameters that
// every product has.

#ifndef JAX_FP8GEMM_GEMM_PRODUCT_H_
#define JAX_FP8GEMM_GEMM_PRODUCT_H_

#include <cstdint>

#include "driver/driver.h"
#include "gemm/gemm_config.h"
#include "gemm/gemm_launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// The start of an Execute binding: the stream, lhs, lhs_scale, rhs and rhs_scale.
inline auto BindProduct() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .Arg<ffi::AnyBuffer>()   // lhs
      .Arg<ffi::AnyBuffer>()   // lhs_scale
      .Arg<ffi::AnyBuffer>()   // rhs
      .Arg<ffi::AnyBuffer>();  // rhs_scale
}

// Returns the type of out.
ffi::DataType OutType(const GemmConfig& config);

// InvalidArgument unless `more`, the operands behind the others, are accum if the config
// accumulates and nothing otherwise. accum must be of the type and shape of `out`, which was
// checked before, and share its buffer.
ffi::Error CheckAccum(const char* op, const GemmConfig& config, const ffi::RemainingArgs& more,
                      const ffi::AnyBuffer& out);

// Returns the parameters of a product whose buffers were checked, without its groups. m, n and k
// are those of GemmParams.
GemmParams ProductParams(const GemmConfig& config, const void* lhs_scale,
                         const ffi::AnyBuffer& rhs_scale, const ffi::AnyBuffer& out, int64_t m,
                         int64_t n, int64_t k);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_PRODUCT_H_
