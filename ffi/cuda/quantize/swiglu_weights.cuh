// The weights of the rows of a thread's fragment, and their dots, for the weighted gradient of
// SwiGLU (swiglu_source.cuh): dots, f32 [f/128][m], are sums of h times dh over each 128 columns of
// a row. A thread adds the products of its 8 columns in their order, by fused operations from 0 on.
// Then 16 threads add their sums, first those of threads 8 apart, then 4, 2 and 1.
#pragma once

#include "quantize/quantize_fragment.cuh"
#include "quantize/quantize_params.cuh"

namespace jax_fp8gemm {

template <bool kIsWeighted>
struct RowWeights {
  template <int kRows>
  __device__ __forceinline__ void load(const QuantizeParams&, int, int, int) {}
  __device__ __forceinline__ void add(int, float, float) {}
  __device__ __forceinline__ void store_dots(const QuantizeParams&, int, int, int) {}
};

template <>
struct RowWeights<true> {
  float weight[kFragmentRows];
  float dot[kFragmentRows] = {};

  // Loads the weights of kRows rows from the fragment's row `first` on, which is row + first.
  template <int kRows>
  __device__ __forceinline__ void load(const QuantizeParams& params, int row, int row_end,
                                       int first) {
#pragma unroll
    for (int i = first; i < first + kRows; ++i) {
      weight[i] = row + i < row_end ? __ldg(params.weights + row + i) : 0.0f;
    }
  }

  __device__ __forceinline__ void add(int i, float h, float dh) { dot[i] = fma_rn(h, dh, dot[i]); }

  // Of a warp, whose columns are of this k-block.
  __device__ __forceinline__ void store_dots(const QuantizeParams& params, int row, int k_block,
                                             int row_end) {
    const int lane = threadIdx.x % 32;
    uint32_t bits[kFragmentRows];
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) bits[i] = __float_as_uint(dot[i]);
    const float sum = __uint_as_float(reduce_rows<Sum>(bits, lane));
    const int sum_row = row + lane % 16 / 2;
    if (lane % 2 == 0 && sum_row < row_end) store_dot(params, sum_row, k_block, sum);
  }

  // The same of one row of each half warp.
  static __device__ __forceinline__ void store_dot_of_row(const QuantizeParams& params, int row,
                                                          int k_block, int row_end, float dot) {
#pragma unroll
    for (int distance = 8; distance >= 1; distance /= 2) {
      dot = add_rn(dot, __shfl_xor_sync(0xffffffff, dot, distance));
    }
    if (threadIdx.x % 16 == 0 && row < row_end) store_dot(params, row, k_block, dot);
  }

 private:
  // Tiles behind the last block of dgate have no dots.
  static __device__ __forceinline__ void store_dot(const QuantizeParams& params, int row,
                                                   int k_block, float dot) {
    constexpr int kScaleBlock = 128;
    if (k_block < ceil_div(params.k / 2, kScaleBlock)) {
      params.dots[static_cast<int64_t>(k_block) * params.m + row] = dot;
    }
  }
};

}  // namespace jax_fp8gemm
