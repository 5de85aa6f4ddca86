// The 8 x 8 elements that one thread of a quantiser holds, and their maxima.
//
// A warp holds 16 rows of one 128-column block. Lanes 0..15 hold the first 8 rows, lanes 16..31 the
// others, and each lane has 8 neighbouring columns. So one load instruction reads two whole rows
// (256 bytes each if 16-bit). A thread owns 8 rows of each of its columns, so a transposed store
// needs no shuffles.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

enum Input { kBF16 = 0, kF16 = 1, kF32 = 2, kE4M3 = 3, kE5M2 = 4 };  // FP8: no fragment

constexpr int kFragmentRows = 8;
constexpr int kFragmentColumns = 8;

// Loads the first `count` (any integer) of 8 bytes in the same way. kIsAligned: the address and
// `count` are multiples of 8.
template <bool kIsAligned>
__device__ __forceinline__ void load_8_bytes(uint2& bytes, const uint8_t* source, int count) {
  if constexpr (kIsAligned) {
    if (count > 0) {
      asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                   : "=r"(bytes.x), "=r"(bytes.y)
                   : "l"(source));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = i < count ? __ldg(source + i) : 0;
      (i < 4 ? bytes.x : bytes.y) |= byte << (i % 4 * 8);
    }
  }
}

// Stores the first `count` (any integer) of 8 bytes. kIsAligned: the address and `count` are
// multiples of 8.
template <bool kIsAligned>
__device__ __forceinline__ void store_8_bytes(uint8_t* target, uint2 bytes, int count) {
  if constexpr (kIsAligned) {
    if (count > 0) *reinterpret_cast<uint2*>(target) = bytes;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) target[i] = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> (i % 4 * 8));
    }
  }
}

template <int kInput, int kRows = kFragmentRows>
struct Fragment {
  static constexpr int kElemBytes = kInput == kF32 ? 4 : 2;
  static constexpr int kVectorElems = 16 / kElemBytes;
  static constexpr int kVectors = kFragmentColumns / kVectorElems;  // 16-byte loads of a row
  static constexpr int kRowWords = kVectors * 4;

  uint32_t words[kRows][kVectors][4];

  // Reads rows `row`.. and columns `column`.. of x, whose rows are `stride` long; zeros from
  // row_end and column_end on. kIsAligned: `column`, column_end and `stride` are multiples of 8.
  template <bool kIsAligned>
  __device__ __forceinline__ void load(const uint8_t* x, int row, int column, int row_end,
                                       int column_end, int stride) {
    const uint8_t* source = x + (static_cast<int64_t>(row) * stride + column) * kElemBytes;
    const int num_rows = row_end - row;  // may be negative
    const int64_t row_bytes = static_cast<int64_t>(stride) * kElemBytes;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int first = column + v * kVectorElems;
        words[i][v][0] = words[i][v][1] = words[i][v][2] = words[i][v][3] = 0;
        if constexpr (kIsAligned) {
          if (i < num_rows && first < column_end) load_16_bytes(words[i][v], source + v * 16);
        } else {
          if (i < num_rows) load_elements(words[i][v], source + v * 16, column_end - first);
        }
      }
      source += row_bytes;
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kRowWords; ++w) words[i][w / 4][w % 4] = 0;
    }
  }

  __device__ __forceinline__ void set_row(int i, const Fragment<kInput, 1>& row) {
#pragma unroll
    for (int w = 0; w < kRowWords; ++w) words[i][w / 4][w % 4] = row.words[0][w / 4][w % 4];
  }

  // Moves row i + count to row i; the last rows stay.
  __device__ __forceinline__ void shift_rows(int count) {
#pragma unroll
    for (int i = 0; i + count < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kRowWords; ++w) words[i][w / 4][w % 4] = words[i + count][w / 4][w % 4];
    }
  }

  // The largest magnitude of row i of the fragment, as f32 bits.
  __device__ __forceinline__ uint32_t row_amax(int i) const {
    uint32_t amax = magnitudes(words[i][0][0]);
#pragma unroll
    for (int w = 1; w < kRowWords; ++w) amax = max_words(amax, magnitudes(words[i][w / 4][w % 4]));
    if constexpr (kInput == kF32) return amax;
    return max_u32(f32_bits(amax, 0), f32_bits(amax, 1));
  }

  // The largest magnitudes of the columns in word w of vector v, packed like the elements.
  __device__ __forceinline__ uint32_t column_amax(int v, int w) const {
    uint32_t amax = magnitudes(words[0][v][w]);
#pragma unroll
    for (int i = 1; i < kRows; ++i) amax = max_words(amax, magnitudes(words[i][v][w]));
    return amax;
  }

  // Element (i, j) as f32: exact.
  __device__ __forceinline__ float at(int i, int j) const {
    const int v = j / kVectorElems;
    const int w = j % kVectorElems * kElemBytes / 4;
    return __uint_as_float(f32_bits(words[i][v][w], j));
  }

  // Sets element (i, j) to x.
  __device__ __forceinline__ void set(int i, int j, float x) {
    static_assert(kInput == kF32, "only an f32 element is a word of its own");
    words[i][j / kVectorElems][j % kVectorElems] = __float_as_uint(x);
  }

  // x rounded to the dtype of the elements.
  static __device__ __forceinline__ float rounded(float x) {
    static_assert(kInput == kF32 || kInput == kBF16, "not needed of f16");
    if constexpr (kInput == kF32) return x;
    return __uint_as_float(pack_bf16(x, 0.0f) << 16);
  }

  static __device__ __forceinline__ uint32_t max_words(uint32_t a, uint32_t b) {
    if constexpr (kInput == kF32) return max_u32(a, b);
    return max_u16x2(a, b);
  }

  // Element j (mod 2, if 16-bit) of a word, as f32 bits.
  static __device__ __forceinline__ uint32_t f32_bits(uint32_t word, int j) {
    if constexpr (kInput == kF32) return word;
    if constexpr (kInput == kBF16) return j % 2 == 0 ? word << 16 : word & 0xffff0000;
    return __float_as_uint(f32_from_f16(static_cast<uint16_t>(j % 2 == 0 ? word : word >> 16)));
  }

 private:
  static __device__ __forceinline__ uint32_t magnitudes(uint32_t word) {
    return word & (kInput == kF32 ? 0x7fffffff : 0x7fff7fff);
  }

  // One vector of a row that is not aligned: element by element, the first `count` of them.
  static __device__ __forceinline__ void load_elements(uint32_t (&words)[4], const uint8_t* source,
                                                       int count) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kInput == kF32) {
        if (w < count) words[w] = __ldg(reinterpret_cast<const uint32_t*>(source) + w);
      } else {
        const uint16_t* elements = reinterpret_cast<const uint16_t*>(source) + 2 * w;
        if (2 * w < count) words[w] = __ldg(elements);
        if (2 * w + 1 < count) words[w] |= static_cast<uint32_t>(__ldg(elements + 1)) << 16;
      }
    }
  }
};

struct Maximum {
  static __device__ __forceinline__ uint32_t combine(uint32_t a, uint32_t b) {
    return max_u32(a, b);
  }
};

// Of the bits of f32.
struct Sum {
  static __device__ __forceinline__ uint32_t combine(uint32_t a, uint32_t b) {
    return __float_as_uint(add_rn(__uint_as_float(a), __uint_as_float(b)));
  }
};

// Reduces x[i] of row i over the 16 lanes of each half warp, first lanes 8 apart, then 4, 2 and 1.
// At each step a lane gives half of its rows to the partner and keeps what it has of the other
// half: 8 shuffles instead of 32, and the result is spread so that one division serves a row. Lane
// l gets row l % 16 / 2.
template <typename Operation>
__device__ __forceinline__ uint32_t reduce_rows(uint32_t (&x)[kFragmentRows], int lane) {
#pragma unroll
  for (int step = 4; step >= 1; step /= 2) {
    const bool keeps_upper = (lane & (2 * step)) != 0;
#pragma unroll
    for (int i = 0; i < step; ++i) {
      const uint32_t kept = select(keeps_upper, x[i + step], x[i]);
      const uint32_t given = select(keeps_upper, x[i], x[i + step]);
      x[i] = Operation::combine(kept, __shfl_xor_sync(0xffffffff, given, 2 * step));
    }
  }
  return Operation::combine(x[0], __shfl_xor_sync(0xffffffff, x[0], 1));
}

}  // namespace jax_fp8gemm
