// A gated activation and its gradient as sources of a quantiser: computed from gate_up and dh, in
// bf16 or f32, where the quantiser holds its elements. activation.cuh has the formulas.
//
// A CTA computes its 128 columns of [dgate, dup] alone. Where column f is among them, a thread has
// gates or ups, or both if f is no multiple of 8. CTAs of dgate and of dup take turns, so that the
// second one finds gate and dh in the L2. Where the config is paired, one CTA computes both
// (swiglu_pairs.cuh).
//
// Weighted, dh of a row is multiplied by the weight of the row in f32 first, and rounded to its
// dtype. And the CTA of dgate adds up h times dh, without the weight (swiglu_weights.cuh).
#pragma once

#include "quantize/activation.cuh"
#include "quantize/quantize_source.cuh"
#include "quantize/swiglu_operands.cuh"
#include "quantize/swiglu_pairs.cuh"

namespace jax_fp8gemm {

template <typename Config, bool kIsGrad, bool kIsWeighted = false>
struct SwigluSource : SwigluOperands<Config, kIsGrad, kIsWeighted> {
  using Operands = SwigluOperands<Config, kIsGrad, kIsWeighted>;
  using Operands::address, Operands::copy_rows, Operands::kBytes, Operands::kInput;
  using Operands::kPrefetchBytes, Operands::kGate, Operands::kUp, Operands::kDh;
  using typename Operands::Elements, typename Operands::Part, typename Operands::Rows;

  static __device__ __forceinline__ bool is_aligned(int k) { return k % (kIsGrad ? 16 : 8) == 0; }

  static __device__ __forceinline__ int k_block(int i, int num_k_blocks) {
    return kIsGrad ? i / 2 + i % 2 * ceil_div(num_k_blocks, 2) : i;
  }

  static __device__ __forceinline__ void prefetch(const QuantizeParams& params, int row, int column,
                                                  int row_end) {
    const int f = kIsGrad ? params.k / 2 : params.k;
    if constexpr (!kIsGrad) {
      prefetch_part<Part::kH>(params, row, column, row_end, f);
    } else if (column < f) {
      prefetch_part<Part::kDgate>(params, row, column, row_end, f);
    } else {
      prefetch_part<Part::kDup>(params, row, column - f, row_end, f);
    }
  }

  template <bool kIsAligned>
  static __device__ __forceinline__ void fill(Elements& elements, const QuantizeParams& params,
                                              int row, int column, int row_end) {
    const int f = kIsGrad ? params.k / 2 : params.k;
    if constexpr (!kIsAligned) {
      fill_by_elements(elements, params, row, column, row_end, f);
      return;
    }
    Rows rows;
    if constexpr (!kIsGrad) {
      fill_part<Part::kH>(elements, rows, params, row, column, row_end, f);
    } else if (column < f) {
      fill_part<Part::kDgate>(elements, rows, params, row, column, row_end, f);
    } else {
      fill_part<Part::kDup>(elements, rows, params, row, column - f, row_end, f);
    }
    rows.store_dots(params, row, column / 128, row_end);
  }

 private:
  template <Part kPart>
  static constexpr bool kReadsUp = kPart != Part::kDup || Config::kActivation == kClampedSwiglu;

  // Columns `column`.. of one part, of its f.
  template <Part kPart>
  static __device__ __forceinline__ void prefetch_part(const QuantizeParams& params, int row,
                                                       int column, int row_end, int f) {
    const int num_rows = column < f ? row_end - row : 0;  // may be negative
    copy_rows(kGate, params.x, row, column, num_rows, 2 * f);
    if constexpr (kReadsUp<kPart>) copy_rows(kUp, params.x, row, f + column, num_rows, 2 * f);
    if constexpr (kPart != Part::kH) copy_rows(kDh, params.dh, row, column, num_rows, f);
  }

  // Columns `column`.. of one part, of its f.
  template <Part kPart>
  static __device__ __forceinline__ void fill_part(Elements& elements, Rows& rows,
                                                   const QuantizeParams& params, int row,
                                                   int column, int row_end, int f) {
    if constexpr (kPrefetchBytes > 0) {
      rows.template load<kFragmentRows>(params, row, row_end, 0);
      cp_async_wait_all();
#pragma unroll
      for (int i = 0; i < kFragmentRows; ++i) {
        Fragment<kInput, 1> gate, up, dh;
        up.clear();
        dh.clear();
        load_shared_16(gate.words[0][0], address(kGate, i));
        if constexpr (kReadsUp<kPart>) load_shared_16(up.words[0][0], address(kUp, i));
        if constexpr (kPart != Part::kH) load_shared_16(dh.words[0][0], address(kDh, i));
        set_rows<kPart>(elements, rows, i, gate, up, dh);
      }
    } else {
      load_part<kPart>(elements, rows, params, row, column, row_end, f);
    }
  }

  // NOTE: the branch, which is all but always taken, keeps ptxas from computing before all loads
  // are under way.
  template <Part kPart>
  static __device__ __forceinline__ void load_part(Elements& elements, Rows& rows,
                                                   const QuantizeParams& params, int row,
                                                   int column, int row_end, int f) {
    constexpr int kRowsAtOnce = kIsWeighted ? 1 : 2;  // with 2 and weights, ptxas spills
#pragma unroll
    for (int first = 0; first < kFragmentRows; first += kRowsAtOnce) {
      Fragment<kInput, kRowsAtOnce> gate, up, dh;
      up.clear();
      dh.clear();
      gate.template load<true>(params.x, row + first, column, row_end, f, 2 * f);
      if constexpr (kReadsUp<kPart>) {
        up.template load<true>(params.x, row + first, f + column, row_end, 2 * f, 2 * f);
      }
      if constexpr (kPart != Part::kH) {
        dh.template load<true>(params.dh, row + first, column, row_end, f, f);
      }
      rows.template load<kRowsAtOnce>(params, row, row_end, first);
      const bool has_rows = row_end > first;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentColumns; ++j) elements.set(first + i, j, 0.0f);
      }
      if (has_rows) set_rows<kPart>(elements, rows, first, gate, up, dh);
    }
  }

  template <Part kPart, int kRows>
  static __device__ __forceinline__ void set_rows(Elements& elements, Rows& rows, int first,
                                                  const Fragment<kInput, kRows>& gate,
                                                  const Fragment<kInput, kRows>& up,
                                                  const Fragment<kInput, kRows>& dh) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j) {
        const float dh_ij = Operands::template weighted<kPart>(rows, first + i, gate.at(i, j),
                                                               up.at(i, j), dh.at(i, j));
        elements.set(first + i, j, gated<Config, kPart>(gate.at(i, j), up.at(i, j), dh_ij));
      }
    }
  }

  // Rows that are not aligned, element by element. What lies outside reads the first elements of
  // the arrays instead: without branches, the loads of a row are in flight at once.
  static __device__ __forceinline__ void fill_by_elements(Elements& elements,
                                                          const QuantizeParams& params, int row,
                                                          int column, int row_end, int f) {
    constexpr bool kIsGelu = Config::kActivation == kGelu || Config::kActivation == kGeluTanh;
    elements.clear();
#pragma unroll 1
    for (int i = 0; i < kFragmentRows; ++i) {
      const bool is_row = row + i < row_end;
      const int64_t source_row = is_row ? row + i : 0;
      const uint8_t* gate_up_row = params.x + source_row * (2 * f) * kBytes;
      const uint8_t* dh_row = params.dh + source_row * f * kBytes;
      float weight = 1.0f, dot = 0.0f;
      if constexpr (kIsWeighted) weight = __ldg(params.weights + source_row);
      elements.shift_rows(1);
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j) {
        const bool is_inside = is_row && column + j < params.k;
        const bool is_dup = kIsGrad && column + j >= f;
        const int source = is_inside ? column + j - (is_dup ? f : 0) : 0;
        const float gate = load_element(gate_up_row, source);
        const float up = load_element(gate_up_row, f + source);
        float x, dh = 0.0f;
        if constexpr (kIsGrad) dh = load_element(dh_row, source);
        if constexpr (kIsWeighted) {
          const float h = gated<Config, Part::kH>(gate, up, 0.0f);
          if (is_inside && !is_dup) dot = fma_rn(h, dh, dot);
          dh = Fragment<kInput>::rounded(mul_rn(dh, weight));
        }
        if constexpr (kIsGrad && kIsGelu) {
          x = 0.0f;
          if (is_inside) {  // NOTE: without this branch ptxas spills
            x = is_dup ? gated<Config, Part::kDup>(gate, up, dh)
                       : gated<Config, Part::kDgate>(gate, up, dh);
          }
        } else if constexpr (kIsGrad) {
          const float dgate = gated<Config, Part::kDgate>(gate, up, dh);
          const float dup = gated<Config, Part::kDup>(gate, up, dh);
          x = is_dup ? dup : dgate;
        } else {
          x = gated<Config, Part::kH>(gate, up, 0.0f);
        }
        elements.set(kFragmentRows - 1, j, is_inside ? x : 0.0f);
      }
      if constexpr (kIsWeighted) {
        Rows::store_dot_of_row(params, row + i, column / 128, row_end, dot);
      }
    }
  }

  static __device__ __forceinline__ float load_element(const uint8_t* row, int column) {
    if constexpr (kInput == kF32) {
      return __ldg(reinterpret_cast<const float*>(row) + column);
    } else {
      const uint32_t bits = __ldg(reinterpret_cast<const uint16_t*>(row) + column);
      return __uint_as_float(Fragment<kInput>::f32_bits(bits, 0));
    }
  }
};

template <typename Config>
struct QuantizeSource<Config, kSwiglu> : SwigluSource<Config, false> {};

template <typename Config, bool kIsWeighted, bool kIsPaired = Config::kIsPaired>
struct SwigluGradSource : SwigluSource<Config, true, kIsWeighted> {};

template <typename Config, bool kIsWeighted>
struct SwigluGradSource<Config, kIsWeighted, true> : SwigluPairs<Config, kIsWeighted> {};

template <typename Config>
struct QuantizeSource<Config, kSwigluGrad> : SwigluGradSource<Config, false> {};

template <typename Config>
struct QuantizeSource<Config, kWeightedSwigluGrad> : SwigluGradSource<Config, true> {};

}  // namespace jax_fp8gemm
