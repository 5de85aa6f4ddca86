#include "cpu/quantize_blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "buffers.h"
#include "errors.h"

namespace jax_fp8gemm {
namespace {

constexpr char kOp[] = "quantize_blocks";

constexpr int32_t kInfBits = 0x7f800000;
constexpr int32_t kSmallestAmaxBits = (127 - 92) << 23;
constexpr int32_t kMantissaMask = 0x7fffff;
constexpr int32_t kNanScaleBits = 0x7fc00000;
constexpr uint8_t kNanValue = 0x7f;

int32_t BitsOf(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float FloatOf(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

struct Bf16 {
  uint16_t bits;
  operator float() const { return FloatOf(int32_t{bits} << 16); }
};

struct F16 {
  uint16_t bits;
  operator float() const {
    const int32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    // Not as an f32 denormal that is scaled up: XLA flushes those to zero.
    if (exponent == 0) return FloatOf(sign | BitsOf(static_cast<float>(mantissa) * 0x1p-24f));
    const int32_t wide = exponent == 31 ? 255 : exponent + 127 - 15;
    return FloatOf(sign | wide << 23 | mantissa << 13);
  }
};

// An FP8 type whose numbers have kMantissa bits behind the leading one.
template <int kMantissaBits, int kExponentBias, int kMax>
struct Fp8 {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = kExponentBias;
  static constexpr int32_t kMaxCode = kMax;  // the largest number, as a byte
};
struct E4m3 : Fp8<3, 7, 0x7e> {
  static constexpr float kFmax = 448;
};
struct E5m2 : Fp8<2, 15, 0x7b> {
  static constexpr float kFmax = 57344;
};

// The byte of a number, rounded to nearest even and saturated.
template <typename Format>
uint8_t Round(float x) {
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr int32_t kSmallestNormalBits = (128 - Format::kBias) << 23;
  // The ulp of this number is the spacing of the denormals.
  constexpr int32_t kDenormalBits = (127 + 23 + 1 - Format::kBias - Format::kMantissa) << 23;
  const int32_t bits = BitsOf(x), size = bits & 0x7fffffff;
  const int32_t denormal = BitsOf(FloatOf(size) + FloatOf(kDenormalBits)) - kDenormalBits;
  const int32_t carry = (size >> kShift & 1) + (1 << (kShift - 1)) - 1;
  const int32_t rounded = (size + carry) >> kShift;
  const int32_t normal = rounded - ((127 - Format::kBias) << Format::kMantissa);
  // All ones or zeros. A branch would keep the compiler from rounding several numbers at once.
  const int32_t is_denormal = -(size < kSmallestNormalBits);
  const int32_t code = std::min(normal, Format::kMaxCode);
  return static_cast<uint8_t>((denormal & is_denormal) | (code & ~is_denormal) |
                              (bits >> 24 & 0x80));
}

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

template <typename Format, typename T>
void QuantizeMatrix(const Matrix<T>& matrix, bool is_square, bool pow2_scale) {
  Tile tile;
  for (tile.row = 0; tile.row < matrix.rows; tile.row += kScaleBlock) {
    tile.rows = std::min(kScaleBlock, matrix.rows - tile.row);
    for (tile.column = 0; tile.column < matrix.columns; tile.column += kScaleBlock) {
      tile.columns = std::min(kScaleBlock, matrix.columns - tile.column);
      Load(matrix, tile);
      QuantizeTile<Format>(matrix, tile, is_square, pow2_scale);
    }
  }
}

struct Options {
  bool is_transposed, is_square, e5m2, pow2_scale;
};

template <typename T>
void QuantizeAll(const ffi::AnyBuffer& x, ffi::AnyBuffer& values, ffi::AnyBuffer& scale,
                 const Options& options) {
  const auto dims = x.dimensions();
  const int64_t m = *(dims.end() - 2), k = dims.back();
  Matrix<T> matrix = {};
  matrix.rows = options.is_transposed ? k : m;
  matrix.columns = options.is_transposed ? m : k;
  matrix.row_stride = options.is_transposed ? 1 : k;
  matrix.column_stride = options.is_transposed ? k : 1;
  const int64_t size = m * k, batch = size == 0 ? 0 : x.element_count() / size;
  const int64_t num_scales = batch == 0 ? 0 : scale.element_count() / batch;
  for (int64_t i = 0; i < batch; ++i) {
    matrix.x = static_cast<const T*>(x.untyped_data()) + i * size;
    matrix.values = static_cast<uint8_t*>(values.untyped_data()) + i * size;
    matrix.scale = static_cast<float*>(scale.untyped_data()) + i * num_scales;
    if (options.e5m2) {
      QuantizeMatrix<E5m2>(matrix, options.is_square, options.pow2_scale);
    } else {
      QuantizeMatrix<E4m3>(matrix, options.is_square, options.pow2_scale);
    }
  }
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

ffi::Error Execute(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
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
        QuantizeAll<Bf16>(x, *values, *scale, options);
        return ffi::Error::Success();
      case ffi::DataType::F16:
        QuantizeAll<F16>(x, *values, *scale, options);
        return ffi::Error::Success();
      case ffi::DataType::F32:
        QuantizeAll<float>(x, *values, *scale, options);
        return ffi::Error::Success();
      default:
        return InvalidArgument(kOp, ": x must be bf16, f16 or f32; got ", ShapeText(x));
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeBlocksHandler, Execute,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Ret<ffi::AnyBuffer>()  // values
                                  .Ret<ffi::AnyBuffer>()  // scale
                                  .Attr<bool>("e5m2")
                                  .Attr<bool>("is_square")
                                  .Attr<bool>("is_transposed")
                                  .Attr<bool>("pow2_scale"));

}  // namespace jax_fp8gemm
