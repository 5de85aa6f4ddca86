// What the sources of a gated activation share (swiglu_source.cuh, swiglu_pairs.cuh): where a
// thread prefetches gate, up and dh, and the weights of rows.
#pragma once

#include "quantize/activation.cuh"
#include "quantize/quantize_source.cuh"
#include "quantize/swiglu_weights.cuh"

namespace jax_fp8gemm {

template <typename Config, bool kIsGrad, bool kIsWeighted>
struct SwigluOperands : DirectSource {
  using Elements = Fragment<kF32>;
  using Part = SwigluPart;

  static constexpr int kInput = Config::kInput;
  static constexpr int kBytes = Fragment<kInput>::kElemBytes;
  // f32 is not prefetched: only one CTA would fit an SM.
  static constexpr int kPrefetchBytes = kInput == kF32 ? 0 : kFragmentRows * (kIsGrad ? 3 : 2) * 16;

  static constexpr bool kLeavesRows = true;

 protected:
  using Rows = RowWeights<kIsWeighted>;

  enum Operand { kGate, kUp, kDh };

  // Where a row of an operand is prefetched to. The 16 bytes of a warp's lanes are neighbours.
  static __device__ __forceinline__ uint32_t address(Operand operand, int row) {
    extern __shared__ uint4 prefetched[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return smem_address(prefetched) + warp * 32 * kPrefetchBytes +
           (operand * kFragmentRows + row) * 512 + lane * 16;
  }

  // Starts to copy 8 columns of the fragment's rows; zeros from the num_rows-th on.
  static __device__ __forceinline__ void copy_rows(Operand operand, const uint8_t* x, int row,
                                                   int column, int num_rows, int stride) {
    const uint8_t* source = x + (static_cast<int64_t>(row) * stride + column) * kBytes;
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      cp_async_16(address(operand, i), source, i < num_rows ? 16 : 0);
      source += static_cast<int64_t>(stride) * kBytes;
    }
  }

  // Returns dh times the weight of row i of the fragment, and adds to the dot of the row.
  template <Part kPart>
  static __device__ __forceinline__ float weighted(Rows& rows, int i, float gate, float up,
                                                   float dh) {
    if constexpr (!kIsWeighted) {
      return dh;
    } else {
      if constexpr (kPart == Part::kDgate) {
        rows.add(i, gated<Config, Part::kH>(gate, up, 0.0f), dh);
      }
      return Fragment<kInput>::rounded(mul_rn(dh, rows.weight[i]));
    }
  }
};

}  // namespace jax_fp8gemm
