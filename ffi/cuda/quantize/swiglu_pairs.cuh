// The gradient of a gated activation where a CTA computes 128 columns of dgate and those of dup at
// once: gate and dh are read once, and the activation is computed once. It needs 16-bit operands
// and f a multiple of 128. dup waits in shared memory, in f32, where gate and up were.
#pragma once

#include "quantize/swiglu_operands.cuh"

namespace jax_fp8gemm {

template <typename Config, bool kIsWeighted>
struct SwigluPairs : SwigluOperands<Config, true, kIsWeighted> {
  using Operands = SwigluOperands<Config, true, kIsWeighted>;
  using Operands::address, Operands::copy_rows, Operands::kInput;
  using Operands::kGate, Operands::kUp, Operands::kDh;
  using typename Operands::Elements, typename Operands::Part, typename Operands::Rows;

  static_assert(Operands::kPrefetchBytes > 0, "dup waits in the place of what is prefetched");

  // Starts to copy gate and up (is_late), or dh, for columns `column`.. of dgate and dup.
  static __device__ __forceinline__ void prefetch_pair(const QuantizeParams& params, int row,
                                                       int column, int row_end, bool is_late) {
    const int f = params.k / 2, num_rows = row_end - row;  // may be negative
    if (is_late) {
      copy_rows(kGate, params.x, row, column, num_rows, 2 * f);
      copy_rows(kUp, params.x, row, f + column, num_rows, 2 * f);
    } else {
      copy_rows(kDh, params.dh, row, column, num_rows, f);
    }
  }

  // Sets the elements of dgate, and leaves those of dup where gate and up were.
  static __device__ __forceinline__ void fill_first(Elements& elements,
                                                    const QuantizeParams& params, int row,
                                                    int column, int row_end) {
    Rows rows;
    rows.template load<kFragmentRows>(params, row, row_end, 0);
    cp_async_wait_all();
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      Fragment<kInput, 1> gate, up, dh;
      load_shared_16(gate.words[0][0], address(kGate, i));
      load_shared_16(up.words[0][0], address(kUp, i));
      load_shared_16(dh.words[0][0], address(kDh, i));
      uint32_t dup[2][4];
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j) {
        const float g = gate.at(0, j), u = up.at(0, j);
        const float d = Operands::template weighted<Part::kDgate>(rows, i, g, u, dh.at(0, j));
        elements.set(i, j, gated<Config, Part::kDgate>(g, u, d));
        dup[j / 4][j % 4] = __float_as_uint(gated<Config, Part::kDup>(g, u, d));
      }
      store_shared_16(address(kGate, i), dup[0]);
      store_shared_16(address(kUp, i), dup[1]);
    }
    rows.store_dots(params, row, column / 128, row_end);
  }

  // Sets the elements of dup that fill_first left.
  static __device__ __forceinline__ void take_second(Elements& elements) {
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      load_shared_16(elements.words[i][0], address(kGate, i));
      load_shared_16(elements.words[i][1], address(kUp, i));
    }
  }
};

}  // namespace jax_fp8gemm
