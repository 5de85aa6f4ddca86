// Quantises 128 rows of a matrix, block by block. jax_fp8gemm/_data/rounding.py has the formulas.

#ifndef JAX_FP8GEMM_CPU_BAND_H_
#define JAX_FP8GEMM_CPU_BAND_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "buffers.h"
#include "cpu/numbers.h"

namespace jax_fp8gemm {

constexpr int32_t kInfBits = 0x7f800000;
constexpr int32_t kSmallestAmaxBits = (127 - 92) << 23;
constexpr int32_t kMantissaMask = 0x7fffff;
constexpr int32_t kNanScaleBits = 0x7fc00000;
constexpr uint8_t kNanValue = 0x7f;

inline float ScaleOf(int32_t amax_bits, float fmax, bool is_power_of_two) {
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

// What QuantizeBand calls is inlined, so that a processor with wider vectors gets code of its own.
template <typename T>
[[gnu::always_inline]] inline void Load(const Matrix<T>& matrix, Tile& tile) {
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
[[gnu::always_inline]] inline int32_t AmaxBits(const float (&row)[kScaleBlock]) {
  int32_t amax = 0;
  for (float x : row) amax = std::max(amax, BitsOf(x) & 0x7fffffff);
  return amax;
}

template <typename Format, typename T>
[[gnu::always_inline]] inline void StoreRow(const Matrix<T>& matrix, const Tile& tile, int64_t i,
                                            float scale) {
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
[[gnu::always_inline]] inline void QuantizeTile(const Matrix<T>& matrix, const Tile& tile,
                                                bool is_square, bool pow2_scale) {
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
[[gnu::always_inline]] inline void QuantizeBand(const Matrix<T>& matrix, int64_t row,
                                                const Options& options) {
  Tile tile;
  tile.row = row;
  tile.rows = std::min(kScaleBlock, matrix.rows - row);
  for (tile.column = 0; tile.column < matrix.columns; tile.column += kScaleBlock) {
    tile.columns = std::min(kScaleBlock, matrix.columns - tile.column);
    Load(matrix, tile);
    QuantizeTile<Format>(matrix, tile, options.is_square, options.pow2_scale);
  }
}

// QuantizeBand for a kind of processor. They differ in speed alone.
template <typename Format, typename T>
using BandQuantizer = void (*)(const Matrix<T>&, int64_t, const Options&);

template <typename Format, typename T>
void QuantizeBandOnAny(const Matrix<T>& matrix, int64_t row, const Options& options) {
  QuantizeBand<Format>(matrix, row, options);
}

#ifdef __x86_64__
template <typename Format, typename T>
[[gnu::target("avx2")]] void QuantizeBandWithAvx2(const Matrix<T>& matrix, int64_t row,
                                                  const Options& options) {
  QuantizeBand<Format>(matrix, row, options);
}

// Returns the one for this processor.
template <typename Format, typename T>
BandQuantizer<Format, T> FindBandQuantizer() {
  const bool has_avx2 = __builtin_cpu_supports("avx2");
  return has_avx2 ? QuantizeBandWithAvx2<Format, T> : QuantizeBandOnAny<Format, T>;
}
#else
template <typename Format, typename T>
BandQuantizer<Format, T> FindBandQuantizer() {
  return QuantizeBandOnAny<Format, T>;
}
#endif

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_CPU_BAND_H_
