// Dequantisation scales in the consumers, and the promotion that applies them.
//
// The bits are a contract, the same in every config, for k-blocks in ascending order:
//   1d2d: promoted = fma(lhs_scale * rhs_scale, accum, promoted)
//   1d1d: promoted = fma(rhs_scale, lhs_scale * accum + 0, promoted)
// Each product is rounded, and the 0 turns -0 into +0. NOTE: 1d1d has a product of two scales for
// every element. Scaling the accumulator twice needs no register for that product, and made the
// kernel 3-10 % faster.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace jax_fp8gemm {

// Whether products of few rows get tiles of kBlockM rows.
template <int kBlockM>
constexpr bool kIsSmall = kBlockM <= 64;

// The scales of up to kCount rows from `row` on in one k-block, out of [num_k_blocks][num_rows] in
// memory, as bulk copies can move them: in whole pieces of 16 bytes, with no rule on the number of
// rows or on where a tile starts. The first scale of the tile lands row_scale_shift() floats behind
// the start. Up to 3 floats at the end of the array are in no whole piece.
template <int kCount>
struct RowScales {
  static constexpr int kMostWindow = kCount + 4;
  uint32_t first, end;  // in memory, of the copied floats; the same where there are none
  uint32_t total;       // less than 2^31
  int window;           // floats from first on that the rows may reach, with any shift

  __device__ __forceinline__ RowScales(int num_rows, int num_k_blocks, int row, int k_block)
      : total(uint32_t(num_k_blocks) * num_rows), window(window_of(num_rows - row)) {
    first = (uint32_t(k_block) * num_rows + row) / 4 * 4;
    end = max(first, min(first + window, total / 4 * 4));  // a tile may begin past the rows
  }

  // num_left: rows from the tile's first on. NOTE: small tiles leave out rows that do not exist.
  // All CTAs read the same scales at about the same time, and those of few rows lie in few lines of
  // the L2. Large tiles have other instructions with it, and take 1 to 6 % longer.
  __device__ __forceinline__ static constexpr int window_of(int num_left) {
    if constexpr (!kIsSmall<kCount>) return kMostWindow;
    const int count = max(0, min(kCount, num_left));
    return (count + 6) / 4 * 4;  // with a shift of 3, in whole pieces
  }

  __device__ __forceinline__ uint32_t bytes() const { return (end - first) * 4; }

  __device__ __forceinline__ void copy(Barrier* barrier, float* smem, const float* scales) const {
    if (end > first) bulk_load(barrier, smem, scales + first, bytes());
  }

  // Stores, by the lanes of a warp, the scales that the copy leaves out.
  __device__ __forceinline__ void store_rest(float* smem, const float* scales, int lane) const {
    const uint32_t i = end + lane;
    if (i < min(first + window, total)) smem[i - first] = scales[i];
  }
};

// Whether row scales are copied by a tensor map, whose rows must be multiples of 16 bytes. NOTE: of
// up to 128 rows, only multiples of 32 bytes, a sector of the L2, are fast by it. All CTAs read the
// few lines of these scales at about the same time: 2112x7168 took 11.5 us with 36 rows, and 9.5
// with copies of pieces. Mirrors HasScaleMap.
__device__ constexpr bool has_scale_map(int num_rows) {
  return num_rows % (num_rows <= 128 ? 8 : 4) == 0;
}

// Whether some scales are in no whole piece.
__device__ constexpr bool has_rest(int num_rows, int num_k_blocks) {
  return (unsigned(num_rows) * unsigned(num_k_blocks)) % 4 != 0;
}

__device__ __forceinline__ uint32_t row_scale_shift(int num_rows, int row, int k_block) {
  return (unsigned(k_block) * unsigned(num_rows) + unsigned(row)) % 4;
}

// The 1d2d scales of a tile's kNumBlocks column blocks, one per block and k-block, in one warp:
// lane l holds those of k-block kChunk c + l of the current chunk c; the next chunk, or the next
// tile's first, is loaded a chunk ahead.
template <int kNumBlocks>
struct BlockScales {
  static constexpr int kChunk = 32;
  float chunk[kNumBlocks], next_chunk[kNumBlocks];

  // scales: rows of num_k_blocks; `row` is that of the tile's first column block, `column` its
  // first column of n. row_step: from the row of a column block to that of the next one.
  __device__ __forceinline__ void prefetch(const float* scales, int n, int num_k_blocks, int row,
                                           int column, int first_k_block, int row_step = 1) {
    const int k_block = first_k_block + threadIdx.x % kChunk;
#pragma unroll
    for (int i = 0; i < kNumBlocks; ++i) {
      const bool is_inside = k_block < num_k_blocks && (column / 128 + i) * 128 < n;
      next_chunk[i] =
          is_inside ? __ldg(scales + size_t(row + i * row_step) * num_k_blocks + k_block) : 0.f;
    }
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < kNumBlocks; ++i) chunk[i] = next_chunk[i];
  }
};

// Promotes the 64 x kN accumulators of one k-block where all columns have one rhs scale (1d2d).
// `scale` has the products of the rhs scale with the scales of the thread's two rows.
template <int kRegs>
__device__ __forceinline__ void promote_1d2d(float* promoted, const float (&accum)[kRegs],
                                             const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) promoted[i] = __fmaf_rn(scale[i / 2 % 2], accum[i], promoted[i]);
}

// Promotes them where column blocks meet inside: every kColumns columns of the tile have the scales
// of a part, and the first of these columns is the offset-th of its part.
template <int kColumns, int kParts, int kRegs>
__device__ __forceinline__ void promote_1d2d_parts(float* promoted, const float (&accum)[kRegs],
                                                   const float (&scale)[kParts][2], int offset) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) {
    const int part = (offset + i / 4 * 8) / kColumns;
    promoted[i] = __fmaf_rn(scale[part][i / 2 % 2], accum[i], promoted[i]);
  }
}

// Promotes them where each column has a scale (1d1d): rhs[2j + c] is the scale of column
// 8j + 2(l%4) + c. Overwrites accum.
template <int kRegs>
__device__ __forceinline__ void promote_1d1d(float* promoted, float (&accum)[kRegs],
                                             const float (&lhs)[2], const float (&rhs)[kRegs / 2]) {
  // NOTE: this is an FMA with a zero that the compiler cannot see through, in place of a
  // multiplication. ptxas lets every second FMA yield, but no multiplication, and 64 instructions
  // of one warp back to back starve the tensor cores. The loop goes row by row, so that it reads
  // the scale of a row once for several products.
  float zero;
  asm volatile("mov.f32 %0, 0f00000000;" : "=f"(zero));
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      if (i / 2 % 2 == row) accum[i] = __fmaf_rn(lhs[row], accum[i], zero);
    }
  }
#pragma unroll
  for (int i = 0; i < kRegs; ++i) {
    promoted[i] = __fmaf_rn(rhs[i / 4 * 2 + i % 2], accum[i], promoted[i]);
  }
}

}  // namespace jax_fp8gemm
