// Rows of x by number, where a quantiser holds its elements: row i of what is quantised is
// x[rows[i]], times weights[i] in f32 if it is weighted. x (s, k) is bf16, f16 or f32, or FP8
// (gather_fp8_source.cuh). A number that is no row of x is the nearest one.
#pragma once

#include "quantize/gather_fp8_source.cuh"
#include "quantize/quantize_source.cuh"

namespace jax_fp8gemm {

template <int kInput, bool kIsWeighted>
struct GatherSource : DirectSource {
  using Elements = Fragment<kIsWeighted ? kF32 : kInput>;

  template <bool kIsAligned>
  static __device__ __forceinline__ void fill(Elements& elements, const QuantizeParams& params,
                                              int row, int column, int row_end) {
    int source[kFragmentRows];  // -1: no row
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      const bool is_row = row + i < row_end;
      source[i] = is_row ? min(max(__ldg(params.rows + row + i), 0), params.num_sources - 1) : -1;
    }
    if constexpr (!kIsWeighted) {
      load<kIsAligned>(elements, params, source, column);
    } else {
      float factor[kFragmentRows];
#pragma unroll
      for (int i = 0; i < kFragmentRows; ++i) {
        factor[i] = source[i] >= 0 ? __ldg(params.weights + row + i) : 1.0f;
      }
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
};

template <int kInput, bool kIsWeighted, bool kIsFp8 = (kInput >= kE4M3)>
struct GatherSourceOf : GatherSource<kInput, kIsWeighted> {};

template <int kInput, bool kIsWeighted>
struct GatherSourceOf<kInput, kIsWeighted, true> : GatherFp8Source<kInput, kIsWeighted> {};

template <typename Config>
struct QuantizeSource<Config, kGather> : GatherSourceOf<Config::kInput, false> {};

template <typename Config>
struct QuantizeSource<Config, kWeightedGather> : GatherSourceOf<Config::kInput, true> {};

}  // namespace jax_fp8gemm
