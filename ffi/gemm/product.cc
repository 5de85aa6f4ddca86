#include "gemm/product.h"

#include <cstddef>

#include "buffers.h"
#include "errors.h"

namespace jax_fp8gemm {

ffi::DataType OutType(const GemmConfig& config) {
  return config.out_f32 ? ffi::DataType::F32 : ffi::DataType::BF16;
}

ffi::Error CheckAccum(const char* op, const GemmConfig& config, const ffi::RemainingArgs& more,
                      const ffi::AnyBuffer& out) {
  if (more.size() != static_cast<size_t>(config.accumulate)) {
    return InvalidArgument(op, ": accum must be given if and only if accumulate is set; got ",
                           more.size(), " more operands, accumulate ", config.accumulate);
  }
  if (!config.accumulate) return ffi::Error::Success();
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer accum, more.get<ffi::AnyBuffer>(0));
  const auto dims = out.dimensions();
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "accum", accum, ffi::DataType::F32, {dims[0], dims[1]}));
  if (accum.untyped_data() == out.untyped_data()) return ffi::Error::Success();
  return InvalidArgument(op, ": accum and out must share a buffer; got accum at ",
                         accum.untyped_data(), ", out at ", out.untyped_data(),
                         ". Alias them in ffi_call.");
}

GemmParams ProductParams(const GemmConfig& config, const void* lhs_scale,
                         const ffi::AnyBuffer& rhs_scale, const ffi::AnyBuffer& out, int64_t m,
                         int64_t n, int64_t k) {
  GemmParams params = {};
  params.lhs_scale = lhs_scale;
  params.rhs_scale = rhs_scale.untyped_data();
  params.out = out.untyped_data();
  if (config.accumulate) params.accum = params.out;
  params.m = params.lhs_rows = static_cast<int32_t>(m);
  params.n = static_cast<int32_t>(n);
  params.k = static_cast<int32_t>(k);
  return params;
}

}  // namespace jax_fp8gemm
