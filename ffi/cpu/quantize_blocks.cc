#include "cpu/quantize_blocks.h"

#include <algorithm>
#include <cstdint>

#include "buffers.h"
#include "cpu/band.h"
#include "cpu/for_each.h"
#include "errors.h"

namespace jax_fp8gemm {
namespace {

constexpr char kOp[] = "quantize_blocks";

template <typename T>
void QuantizeAll(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, ffi::AnyBuffer& values,
                 ffi::AnyBuffer& scale, const Options& options) {
  const auto dims = x.dimensions();
  const int64_t m = *(dims.end() - 2), k = dims.back(), size = m * k;
  if (x.element_count() == 0) return;
  const int64_t batch = x.element_count() / size, num_scales = scale.element_count() / batch;
  const int64_t num_bands = CeilDiv(options.is_transposed ? k : m, kScaleBlock);
  const auto quantizer = options.e5m2 ? FindBandQuantizer<E5m2, T>() : FindBandQuantizer<E4m3, T>();
  const auto quantize_band = [&](int64_t i) {
    const int64_t b = i / num_bands, row = i % num_bands * kScaleBlock;
    Matrix<T> matrix = {};
    matrix.x = static_cast<const T*>(x.untyped_data()) + b * size;
    matrix.row_stride = options.is_transposed ? 1 : k;
    matrix.column_stride = options.is_transposed ? k : 1;
    matrix.rows = options.is_transposed ? k : m;
    matrix.columns = options.is_transposed ? m : k;
    matrix.values = static_cast<uint8_t*>(values.untyped_data()) + b * size;
    matrix.scale = static_cast<float*>(scale.untyped_data()) + b * num_scales;
    quantizer(matrix, row, options);
  };
  // A thread that quantises fewer elements than these takes longer to wake up than to work.
  constexpr int64_t kElementsOfThread = 1 << 16;
  ForEach(pool, batch * num_bands, x.element_count() / kElementsOfThread, quantize_band);
}

// InvalidArgument unless `result` has the type, the batch of x, and rows and columns behind it.
ffi::Error CheckResult(const char* name, const ffi::AnyBuffer& result, ffi::DataType type,
                       const ffi::AnyBuffer& x, int64_t rows, int64_t columns) {
  const auto dims = result.dimensions(), of_x = x.dimensions();
  if (result.element_type() == type && dims.size() == of_x.size() &&
      std::equal(of_x.begin(), of_x.end() - 2, dims.begin()) && *(dims.end() - 2) == rows &&
      dims.back() == columns) {
    return ffi::Error::Success();
  }
  return InvalidArgument(kOp, ": ", name, " must be ", ShortType(type), "[...,", rows, ",", columns,
                         "] with the first dimensions of x ", ShapeText(x), "; got ",
                         ShapeText(result));
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                   ffi::Result<ffi::AnyBuffer> scale, bool e5m2, bool is_square, bool is_transposed,
                   bool pow2_scale) {
  return NoThrow([&]() -> ffi::Error {
    const auto dims = x.dimensions();
    if (dims.size() < 2) {
      return InvalidArgument(kOp, ": x must be (..., m, k); got ", ShapeText(x));
    }
    const int64_t m = *(dims.end() - 2), k = dims.back();
    const int64_t rows = is_transposed ? k : m, columns = is_transposed ? m : k;
    FFI_RETURN_IF_ERROR(CheckResult("values", *values, Fp8Type(e5m2), x, rows, columns));
    FFI_RETURN_IF_ERROR(CheckResult("scale", *scale, ffi::DataType::F32, x,
                                    is_square ? CeilDiv(rows, kScaleBlock) : rows,
                                    CeilDiv(columns, kScaleBlock)));
    const Options options = {is_transposed, is_square, e5m2, pow2_scale};
    switch (x.element_type()) {
      case ffi::DataType::BF16:
        QuantizeAll<Bf16>(pool, x, *values, *scale, options);
        return ffi::Error::Success();
      case ffi::DataType::F16:
        QuantizeAll<F16>(pool, x, *values, *scale, options);
        return ffi::Error::Success();
      case ffi::DataType::F32:
        QuantizeAll<float>(pool, x, *values, *scale, options);
        return ffi::Error::Success();
      default:
        return InvalidArgument(kOp, ": x must be bf16, f16 or f32; got ", ShapeText(x));
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeBlocksHandler, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Ret<ffi::AnyBuffer>()  // values
                                  .Ret<ffi::AnyBuffer>()  // scale
                                  .Attr<bool>("e5m2")
                                  .Attr<bool>("is_square")
                                  .Attr<bool>("is_transposed")
                                  .Attr<bool>("pow2_scale"));

}  // namespace jax_fp8gemm
