#include "copy_rows/copy_rows_params.h"

#include <algorithm>

#include "buffers.h"
#include "errors.h"

namespace jax_fp8gemm {
namespace {

constexpr const char* kOp = "copy_rows";

// InvalidArgument unless x, places and values are matrices whose extents the kernel can index.
ffi::Error CheckExtents(const CopyRowsConfig& config, const ffi::AnyBuffer& x,
                        const ffi::AnyBuffer& places, const ffi::AnyBuffer& values) {
  const ffi::DataType type = x.element_type();
  bool is_right = type == ffi::DataType::F8E4M3FN || type == ffi::DataType::F8E5M2;
  for (const ffi::AnyBuffer* buffer : {&x, &places, &values}) {
    const auto dims = buffer->dimensions();
    is_right &= dims.size() == 2 && std::max(dims[0], dims[1]) <= kMaxDim;
  }
  if (is_right) {
    const int64_t s = x.dimensions()[0], k = x.dimensions()[1];
    is_right = k % config.word_bytes == 0 && s * CeilDiv(k, kPieceBytes) <= INT32_MAX;
  }
  if (is_right) return ffi::Error::Success();
  return InvalidArgument(kOp,
                         ": x must be FP8[s,k], places [s,c] and values [m,k] with extents of ",
                         "at most 2^30, k a multiple of ", config.word_bytes, ", and x less than ",
                         "2^31 pieces of ", kPieceBytes, " bytes of a row; got x ", ShapeText(x),
                         ", places ", ShapeText(places), ", values ", ShapeText(values));
}

}  // namespace

ffi::ErrorOr<CopyRowsParams> BindCopyRowsParams(
    const CopyRowsConfig& config, const ffi::AnyBuffer& x, const ffi::AnyBuffer& x_scale,
    const ffi::AnyBuffer& places, const ffi::AnyBuffer& values, const ffi::AnyBuffer& scale) {
  FFI_RETURN_IF_ERROR(CheckExtents(config, x, places, values));
  const int64_t s = x.dimensions()[0], k = x.dimensions()[1], kb = CeilDiv(k, kScaleBlock);
  const int64_t c = places.dimensions()[1], m = values.dimensions()[0];
  const ffi::DataType type = x.element_type();
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "x", x, type, {s, k}));
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "x_scale", x_scale, ffi::DataType::F32, {s, kb}));
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "places", places, ffi::DataType::S32, {s, c}));
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "values", values, type, {m, k}));
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "scale", scale, ffi::DataType::F32, {m, kb}));
  CopyRowsParams params = {};
  params.x = x.untyped_data();
  params.x_scale = x_scale.untyped_data();
  params.places = places.untyped_data();
  params.values = values.untyped_data();
  params.scale = scale.untyped_data();
  params.num_sources = static_cast<int32_t>(s);
  params.num_copies = static_cast<int32_t>(c);
  params.m = static_cast<int32_t>(m);
  params.k = static_cast<int32_t>(k);
  return params;
}

}  // namespace jax_fp8gemm
