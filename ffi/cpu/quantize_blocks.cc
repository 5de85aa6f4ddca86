#include "cpu/quantize_blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "buffers.h"
#include "cpu/for_each.h"
#include "cpu/numbers.h"
#include "errors.h"

namespace jax_fp8gemm {
namespace {

constexpr char kOp[] = "quantize_blocks";

constexpr int32_t kInfBits = 0x7f800000;
constexpr int32_t kSmallestAmaxBits = (127 - 92) << 23;
constexpr int32_t kMantissaMask = 0x7fffff;
constexpr int32_t kNanScaleBits = 0x7fc00000;
constexpr uint8_t kNanValue = 0x7f;

float ScaleOf(int32_t amax_bits, float fmax, bool is_power_of_two) {
  if (amax_bits >= kInfBits) return FloatOf(kNanScaleBits);
  const float scale = FloatOf(std::max(amax_bits, kSmallestAmaxBits)) / fmax;
  if (!is_power_of_two) return scale;
  return FloatOf((BitsOf(scale) + kMantissaMask) & ~kMantissaMask);
}

// One matrix and its results.
template <typename T>
struct Matrix {
  const T* x;
  int64_t row_stride, column_stride;  // of x, or of its transpose
  int64_t rows, columns;              // of the values
  uint8_t* values;
  float* scale;
};

// Rows and columns [row, row + rows) and [column, column + columns) in f32. Zeros complete a row.
struct Tile {
  float x[kScaleBlock][kScaleBlock];
  int64_t row, column, rows, columns;
};

template <typename T>
void Load(const Matrix<T>& matrix, Tile& tile) {
  const T* start = matrix.x + tile.row * matrix.row_stride + tile.column * matrix.column_stride;
  if (tile.columns < kScaleBlock) std::memset(tile.x, 0, tile.rows * sizeof(tile.x[0]));
  // Columns of a few cache lines at a time, where the elements of a row are apart in memory.
  const int64_t step = matrix.column_stride == 1 ? kScaleBlock : 16;
  for (int64_t first = 0; first < tile.columns; first += step) {
    const int64_t end = std::min(first + step, tile.columns);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const T* row = start + i * matrix.row_stride;
      for (int64_t j = first; j < end; ++j) tile.x[i][j] = row[j * matrix.column_stride];
    }
  }
}

// The largest bits of |x| in a row. They order as the numbers do, with NaN above Inf.
int32_t AmaxBits(const float (&row)[kScaleBlock]) {
  int32_t amax = 0;
  for (float x : row) amax = std::max(amax, BitsOf(x) & 0x7fffffff);
  return amax;
}

template <typename Format, typename T>
void StoreRow(const Matrix<T>& matrix, const Tile& tile, int64_t i, float scale) {
  // Not read from the tile in the loop: bytes may alias anything.
  const int64_t columns = tile.columns;
  const float* __restrict x = tile.x[i];
  uint8_t* __restrict values = matrix.values + (tile.row + i) * matrix.columns + tile.column;
  if (scale != scale) {
    std::memset(values, kNanValue, columns);
    return;
  }
  const float inverse = 1 / scale;
  for (int64_t j = 0; j < columns; ++j) values[j] = Round<Format>(x[j] * inverse);
}

template <typename Format, typename T>
void QuantizeTile(const Matrix<T>& matrix, const Tile& tile, bool is_square, bool pow2_scale) {
  const int64_t blocks = CeilDiv(matrix.columns, kScaleBlock), block = tile.column / kScaleBlock;
  if (is_square) {
    int32_t amax = 0;
    for (int64_t i = 0; i < tile.rows; ++i) amax = std::max(amax, AmaxBits(tile.x[i]));
    const float scale = ScaleOf(amax, Format::kFmax, pow2_scale);
    matrix.scale[tile.row / kScaleBlock * blocks + block] = scale;
    for (int64_t i = 0; i < tile.rows; ++i) StoreRow<Format>(matrix, tile, i, scale);
    return;
  }
  for (int64_t i = 0; i < tile.rows; ++i) {
    const float scale = ScaleOf(AmaxBits(tile.x[i]), Format::kFmax, pow2_scale);
    matrix.scale[(tile.row + i) * blocks + block] = scale;
    StoreRow<Format>(matrix, tile, i, scale);
  }
}

struct Options {
  bool is_transposed, is_square, e5m2, pow2_scale;
};

// Quantises rows [row, row + 128) of the values.
template <typename Format, typename T>
void QuantizeBand(const Matrix<T>& matrix, int64_t row, const Options& options) {
  Tile tile;
  tile.row = row;
  tile.rows = std::min(kScaleBlock, matrix.rows - row);
  for (tile.column = 0; tile.column < matrix.columns; tile.column += kScaleBlock) {
    tile.columns = std::min(kScaleBlock, matrix.columns - tile.column);
    Load(matrix, tile);
    QuantizeTile<Format>(matrix, tile, options.is_square, options.pow2_scale);
  }
}

template <typename T>
void QuantizeAll(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, ffi::AnyBuffer& values,
                 ffi::AnyBuffer& scale, const Options& options) {
  const auto dims = x.dimensions();
  const int64_t m = *(dims.end() - 2), k = dims.back(), size = m * k;
  if (x.element_count() == 0) return;
  const int64_t batch = x.element_count() / size, num_scales = scale.element_count() / batch;
  const int64_t num_bands = CeilDiv(options.is_transposed ? k : m, kScaleBlock);
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
    options.e5m2 ? QuantizeBand<E5m2>(matrix, row, options)
                 : QuantizeBand<E4m3>(matrix, row, options);
  };
  ForEach(pool, batch * num_bands, quantize_band);
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
