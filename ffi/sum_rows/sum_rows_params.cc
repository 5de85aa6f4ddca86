#include "sum_rows/sum_rows_params.h"

#include <algorithm>

#include "buffers.h"
#include "errors.h"

namespace jax_fp8gemm {
namespace {

constexpr const char* kOp = "sum_rows";

// InvalidArgument unless rows, places and sums are matrices whose extents the kernel can index.
ffi::Error CheckExtents(const SumRowsConfig& config, const ffi::AnyBuffer& rows,
                        const ffi::AnyBuffer& places, const ffi::AnyBuffer& sums) {
  const int64_t element_bytes = SumRowsElementBytes(config.input);
  bool is_right = true;
  for (const ffi::AnyBuffer* buffer : {&rows, &places, &sums}) {
    const auto dims = buffer->dimensions();
    is_right &= dims.size() == 2 && std::max(dims[0], dims[1]) <= kMaxDim;
  }
  if (is_right) {
    const int64_t s = sums.dimensions()[0], row_bytes = sums.dimensions()[1] * element_bytes;
    is_right =
        row_bytes % config.word_bytes == 0 && s * CeilDiv(row_bytes, kSumPieceBytes) <= INT32_MAX;
  }
  if (is_right) return ffi::Error::Success();
  return InvalidArgument(
      kOp, ": rows must be [m,k], places [s,c] and sums [s,k] with extents of at ",
      "most 2^30, k a multiple of ", config.word_bytes / element_bytes,
      ", and sums less than 2^31 pieces of ", kSumPieceBytes, " bytes of a row; got rows ",
      ShapeText(rows), ", places ", ShapeText(places), ", sums ", ShapeText(sums));
}

}  // namespace

ffi::ErrorOr<SumRowsParams> BindSumRowsParams(const SumRowsConfig& config,
                                              const ffi::AnyBuffer& rows,
                                              const ffi::AnyBuffer& places,
                                              const ffi::AnyBuffer& weights,
                                              const ffi::AnyBuffer& sums) {
  FFI_RETURN_IF_ERROR(CheckExtents(config, rows, places, sums));
  const int64_t m = rows.dimensions()[0], k = sums.dimensions()[1];
  const int64_t s = sums.dimensions()[0], c = places.dimensions()[1];
  const ffi::DataType type = kSumRowsInputs[config.input];
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rows", rows, type, {m, k}));
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "places", places, ffi::DataType::S32, {s, c}));
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "weights", weights, ffi::DataType::F32, {s, c}));
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "sums", sums, type, {s, k}));
  SumRowsParams params = {};
  params.rows = rows.untyped_data();
  params.places = places.untyped_data();
  params.weights = weights.untyped_data();
  params.sums = sums.untyped_data();
  params.num_sums = static_cast<int32_t>(s);
  params.num_places = static_cast<int32_t>(c);
  params.m = static_cast<int32_t>(m);
  params.k = static_cast<int32_t>(k);
  return params;
}

}  // namespace jax_fp8gemm
