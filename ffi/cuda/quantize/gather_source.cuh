// Rows of x by number, where a quantiser holds its elements: row i of what is quantised is
// x[rows[i]], times weights[i] in f32 if it is weighted. x (s, k) is bf16, f16 or f32; or FP8 with
// scales [k/128][s], and then multiplied by those first. A number that is no row of x is the
// nearest one.
#pragma once

#include "quantize/quantize_source.cuh"

namespace jax_fp8gemm {

template <int kInput, bool kIsWeighted>
struct GatherSource : DirectSource {
  static constexpr bool kIsFp8 = kInput >= kE4M3;
  static constexpr bool kIsCopy = !kIsFp8 && !kIsWeighted;
  using Elements = Fragment<kIsCopy ? kInput : kF32>;

  template <bool kIsAligned>
  static __device__ __forceinline__ void fill(Elements& elements, const QuantizeParams& params,
                                              int row, int column, int row_end) {
    int source[kFragmentRows];  // -1: no row
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      const bool is_row = row + i < row_end;
      source[i] = is_row ? min(max(__ldg(params.rows + row + i), 0), params.num_sources - 1) : -1;
    }
    if constexpr (kIsCopy) {
      load<kIsAligned>(elements, params, source, column);
    } else {
      float factor[kFragmentRows];
#pragma unroll
      for (int i = 0; i < kFragmentRows; ++i) {
        factor[i] = kIsWeighted && source[i] >= 0 ? __ldg(params.weights + row + i) : 1.0f;
      }
      if constexpr (kIsFp8) {
        fill_fp8<kIsAligned>(elements, params, source, factor, column);
      } else {
        Fragment<kInput> x;
        load<kIsAligned>(x, params, source, column);
#pragma unroll
        for (int i = 0; i < kFragmentRows; ++i) {
#pragma unroll
          for (int j = 0; j < kFragmentColumns; ++j) {
            elements.set(i, j, mul_rn(x.at(i, j), factor[i]));
          }
        }
      }
    }
  }

 private:
  template <bool kIsAligned>
  static __device__ __forceinline__ void load(Fragment<kInput>& x, const QuantizeParams& params,
                                              const int (&source)[kFragmentRows], int column) {
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      Fragment<kInput, 1> line;
      const int end = source[i] < 0 ? source[i] : source[i] + 1;
      line.template load<kIsAligned>(params.x, source[i], column, end, params.k, params.k);
      x.set_row(i, line);
    }
  }

  template <bool kIsAligned>
  static __device__ __forceinline__ void fill_fp8(Elements& elements, const QuantizeParams& params,
                                                  const int (&source)[kFragmentRows],
                                                  const float (&factor)[kFragmentRows],
                                                  int column) {
    uint2 bytes[kFragmentRows];
    float scale[kFragmentRows];
    const float* scales = params.x_scale + static_cast<int64_t>(column / 128) * params.num_sources;
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      const bool is_row = source[i] >= 0;
      bytes[i] = {0, 0};
      scale[i] = is_row && column < params.k ? __ldg(scales + source[i]) : 0.0f;
      const uint8_t* x = params.x + static_cast<int64_t>(source[i]) * params.k + column;
      if (is_row) load_8_bytes<kIsAligned>(bytes[i], x, params.k - column);
    }
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentColumns; j += 2) {
        const uint32_t word = (j < 4 ? bytes[i].x : bytes[i].y) >> (j % 4 * 8);
        const uint32_t pair = f16x2_from_fp8x2<kInput == kE5M2>(static_cast<uint16_t>(word));
        elements.set(i, j, scaled(pair, scale[i], factor[i]));
        elements.set(i, j + 1, scaled(pair >> 16, scale[i], factor[i]));
      }
    }
  }

  static __device__ __forceinline__ float scaled(uint32_t f16, float scale, float factor) {
    const float x = mul_rn(f32_from_f16(static_cast<uint16_t>(f16)), scale);
    return kIsWeighted ? mul_rn(x, factor) : x;
  }
};

template <typename Config>
struct QuantizeSource<Config, kGather> : GatherSource<Config::kInput, false> {};

template <typename Config>
struct QuantizeSource<Config, kWeightedGather> : GatherSource<Config::kInput, true> {};

}  // namespace jax_fp8gemm
