// The sources of a quantiser: x itself, or values that are computed from operands as they are read.
//
// A source says what fills the fragment of a thread:
//   Elements               the fragment
//   is_aligned(k)          whether rows of k results are read by 16 bytes and written by 8
//   k_block(i, n)          the i-th of n k-blocks, in the order in which CTAs take them
//   kPrefetchBytes         dynamic shared memory of a thread, for what makes its next fragment
//   prefetch(...)          starts to copy that, if kPrefetchBytes > 0 and rows are aligned
//   fill<kIsAligned>(...)  sets rows `row`.. and columns `column`.. of what is quantised, (m, k);
//                          zeros from row_end and from column k on
//   kLooksUpRows           whether numbers of rows are loaded before what is prefetched. Then it
//                          has load_number, prefetch and take (gather_fp8_source.cuh) for a warp's
//                          rows, in place of prefetch and fill<true>
//   kLeavesRows            whether rows of no group are not stored, where columns are ragged
//   kWalksDown             whether CTAs take all rows of some k-blocks before the next ones
//   prefetch_pair, fill_first, take_second
//                          in place of prefetch and fill, where the config is paired
//                          (swiglu_pairs.cuh)
#pragma once

#include "quantize/quantize_fragment.cuh"
#include "quantize/quantize_params.cuh"

namespace jax_fp8gemm {

enum SourceKind {
  kPlain = 0,
  kSwiglu = 1,
  kSwigluGrad = 2,
  kGather = 3,
  kWeightedGather = 4,
  kWeightedSwigluGrad = 5
};

// A source that prefetches nothing and has no order of its own.
struct DirectSource {
  static constexpr int kPrefetchBytes = 0;
  static constexpr bool kLooksUpRows = false;
  static constexpr bool kLeavesRows = false;
  static constexpr bool kWalksDown = false;

  static __device__ __forceinline__ bool is_aligned(int k) { return k % 8 == 0; }
  static __device__ __forceinline__ int k_block(int i, int) { return i; }
};

template <typename Config, int kSource = Config::kSource>
struct QuantizeSource;

template <typename Config>
struct QuantizeSource<Config, kPlain> : DirectSource {
  using Elements = Fragment<Config::kInput>;

  template <bool kIsAligned>
  static __device__ __forceinline__ void fill(Elements& elements, const QuantizeParams& params,
                                              int row, int column, int row_end) {
    elements.template load<kIsAligned>(params.x, row, column, row_end, params.k, params.k);
  }
};

}  // namespace jax_fp8gemm
