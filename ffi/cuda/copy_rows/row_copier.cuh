// Copies rows of FP8 values, with their 1x128 scales, to numbered rows of the result.
//
//   values[places[i][j]] = x[i],  scale[:, places[i][j]] = x_scale[i, :]    for i < s, j < c
//
// A place that is no row of the result means no copy. No two places that are rows may be equal.
// Rows of the result that no place names are left as they were. A row of x is read once for 32 of
// its places, and not at all if none of them is a row of the result.
//
// Layouts: x (s, k) and values (m, k) are row-major. x_scale is row-major too, as devices exchange
// it: the scales of a row are neighbours. scale is [k/128][m], as the products read it.
//
// Work: a warp takes a piece of 2048 bytes of a row of x, and the 16 scales of it. Warps never
// meet. Neighbouring warps take neighbouring pieces, so that whole rows are written at about the
// same time.
//
// Timeline of a warp: a lane reads each place of the row; the scales, and the values by 4 loads of
// 512 bytes; then the stores of each copy. So a warp has 2 KiB in flight, and the 48 warps of an SM
// 96 KiB. At 3 TB/s an SM moves 23 KiB in 1 us, about what a load takes.
//
// Stores of values fill whole lines. A scale is a store of 4 bytes. The rows of an expert follow
// each other in the order of tokens, so warps that run at the same time fill its sectors in the L2.
//
// Words are of 16 bytes, or of 1 byte where k is no multiple of 16.
//
// Limits: s, m, k, c <= 2^30, less than 2^31 pieces. Sources: PTX ISA ld.global.nc.
#pragma once

#include "copy_rows/copy_rows_params.cuh"
#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

template <int kBytes>
struct CopiedWord;

template <>
struct CopiedWord<16> {
  uint32_t words[4];

  __device__ __forceinline__ void load(const uint8_t* source) { load_16_bytes(words, source); }
  __device__ __forceinline__ void store(uint8_t* target) const {
    *reinterpret_cast<uint4*>(target) = {words[0], words[1], words[2], words[3]};
  }
};

template <>
struct CopiedWord<1> {
  uint8_t byte;

  __device__ __forceinline__ void load(const uint8_t* source) { byte = __ldg(source); }
  __device__ __forceinline__ void store(uint8_t* target) const { *target = byte; }
};

template <typename Config>
struct RowCopier {
  static constexpr int kScaleBlock = 128;
  static constexpr int kNumWarps = 8;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kMinCtas = 6;        // of an SM; with 8 a thread would spill registers
  static constexpr int kPieceBytes = 2048;  // of a row of x, for one warp

  static constexpr int kWordBytes = Config::kWordBytes;
  static constexpr int kNumWords = 4;  // of a lane, in flight at once
  static constexpr int kStepBytes = 32 * kWordBytes;

  static_assert(kPieceBytes / kScaleBlock <= 32, "a lane copies one scale of a piece");
  static_assert(kPieceBytes % (kNumWords * kStepBytes) == 0, "a piece is whole steps");

  const CopyRowsParams& params;
  const int lane;

  // unit: the number of a piece, through all rows of x.
  __device__ __forceinline__ void run(unsigned unit) const {
    const unsigned num_pieces = ceil_div(params.k, kPieceBytes);
    const unsigned row = unit / num_pieces;
    if (row >= unsigned(params.num_sources)) return;
    const int first_column = unit % num_pieces * kPieceBytes;
    const int* places = params.places + int64_t(row) * params.num_copies;
    for (int first = 0; first < params.num_copies; first += 32) {
      const int place = first + lane < params.num_copies ? __ldg(places + first + lane) : -1;
      const unsigned copies = __ballot_sync(0xffffffff, unsigned(place) < unsigned(params.m));
      if (copies != 0) copy(row, first_column, place, copies);
    }
  }

 private:
  // copies: the lanes whose `place` is a row of the result.
  __device__ __forceinline__ void copy(int row, int first_column, int place,
                                       unsigned copies) const {
    const int num_k_blocks = ceil_div(params.k, kScaleBlock);
    const int k_block = first_column / kScaleBlock + lane;
    const bool has_scale = lane < kPieceBytes / kScaleBlock && k_block < num_k_blocks;
    float scale = 0.0f;
    if (has_scale) scale = __ldg(params.x_scale + int64_t(row) * num_k_blocks + k_block);

    const int end = min(first_column + kPieceBytes, params.k);
#pragma unroll 1
    for (int first = first_column; first < end; first += kNumWords * kStepBytes) {
      copy_step(row, first + lane * kWordBytes, place, copies);
    }

    float* scales = params.scale + int64_t(k_block) * params.m;
    for (unsigned left = copies; left != 0; left &= left - 1) {
      const int target = __shfl_sync(0xffffffff, place, __ffs(left) - 1);
      if (has_scale) scales[target] = scale;
    }
  }

  // column: of the lane's first word.
  __device__ __forceinline__ void copy_step(int row, int column, int place, unsigned copies) const {
    CopiedWord<kWordBytes> words[kNumWords];
    const uint8_t* source = params.x + int64_t(row) * params.k + column;
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
      if (column + i * kStepBytes < params.k) words[i].load(source + i * kStepBytes);
    }
    for (unsigned left = copies; left != 0; left &= left - 1) {
      const int64_t target_row = __shfl_sync(0xffffffff, place, __ffs(left) - 1);
      uint8_t* target = params.values + target_row * params.k + column;
#pragma unroll
      for (int i = 0; i < kNumWords; ++i) {
        if (column + i * kStepBytes < params.k) words[i].store(target + i * kStepBytes);
      }
    }
  }
};

}  // namespace jax_fp8gemm
