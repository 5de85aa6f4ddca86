// A gated activation and its gradient as sources of a quantiser: computed from gate_up and dh, in
// bf16 or f32, where the quantiser holds its elements. activation.cuh has the formulas.
//
// A CTA computes its 128 columns of [dgate, dup] alone. Where column f is among them, a thread has
// gates or ups, or both if f is no multiple of 8. CTAs of dgate and of dup take turns, so that the
// second one finds gate and dh in the L2.
//
// Paired, which needs 16-bit operands and f a multiple of 128, a CTA computes 128 columns of dgate
// and those of dup at once. dup waits in shared memory, in f32, where gate and up were.
//
// Weighted, dh of a row is multiplied by the weight of the row in f32 first, and rounded to its
// dtype. And the CTA of dgate adds up h times dh, without the weight (swiglu_weights.cuh).
#pragma once

#include "quantize/activation.cuh"
#include "quantize/quantize_source.cuh"
#include "quantize/swiglu_weights.cuh"

namespace jax_fp8gemm {

template <typename Config, bool kIsGrad, bool kIsWeighted = false>
struct SwigluSource : DirectSource {
  using Elements = Fragment<kF32>;
  using Part = SwigluPart;

  static constexpr int kInput = Config::kInput;
  static constexpr int kBytes = Fragment<kInput>::kElemBytes;
  // f32 is not prefetched: only one CTA would fit an SM.
  static constexpr int kPrefetchBytes = kInput == kF32 ? 0 : kFragmentRows * (kIsGrad ? 3 : 2) * 16;

  static constexpr bool kLeavesRows = true;
  static_assert(!Config::kIsPaired || (kIsGrad && kPrefetchBytes > 0), "pairs are of 16-bit dh");

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

  // Paired: starts to copy gate and up (is_late), or dh, for columns `column`.. of dgate and dup.
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
        const float d = weighted<Part::kDgate>(rows, i, g, u, dh.at(0, j));
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
  using Rows = RowWeights<kIsWeighted>;

  enum Operand { kGate, kUp, kDh };

  template <Part kPart>
  static constexpr bool kReadsUp = kPart != Part::kDup || Config::kActivation == kClampedSwiglu;

  // Where a row of an operand is prefetched to. The 16 bytes of a warp's lanes are neighbours.
  static __device__ __forceinline__ uint32_t address(Operand operand, int row) {
    extern __shared__ uint4 prefetched[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return smem_address(prefetched) + warp * 32 * kPrefetchBytes +
           (operand * kFragmentRows + row) * 512 + lane * 16;
  }

  // Columns `column`.. of one part, of its f.
  template <Part kPart>
  static __device__ __forceinline__ void prefetch_part(const QuantizeParams& params, int row,
                                                       int column, int row_end, int f) {
    const int num_rows = column < f ? row_end - row : 0;  // may be negative
    copy_rows(kGate, params.x, row, column, num_rows, 2 * f);
    if constexpr (kReadsUp<kPart>) copy_rows(kUp, params.x, row, f + column, num_rows, 2 * f);
    if constexpr (kPart != Part::kH) copy_rows(kDh, params.dh, row, column, num_rows, f);
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
        const float dh_ij =
            weighted<kPart>(rows, first + i, gate.at(i, j), up.at(i, j), dh.at(i, j));
        elements.set(first + i, j, gated<Config, kPart>(gate.at(i, j), up.at(i, j), dh_ij));
      }
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

template <typename Config>
struct QuantizeSource<Config, kSwigluGrad> : SwigluSource<Config, true> {};

template <typename Config>
struct QuantizeSource<Config, kWeightedSwigluGrad> : SwigluSource<Config, true, true> {};

}  // namespace jax_fp8gemm
