// The producer's last warp, in the masked form of groups: stores zeros in the rows of no group,
// while the other roles multiply.
//
// The unused rows of a group follow each other in memory. They are cut into pieces, and a CTA takes
// every gridDim.x-th of the pieces of all groups. It spreads its pieces over about the time that
// its tiles take. NOTE: with zeros stored as fast as possible, a product of 6 groups of 1000 rows
// took 7 % longer.
#pragma once

#include "gemm/tile.cuh"
#include "groups.cuh"
#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct RowClearer {
  static constexpr int kPieceBytes = 4096;
  static constexpr int kStepBytes = 32 * sizeof(uint4);  // of a warp
  // Of a k-block of a tile: 5/4 of what the tensor cores need, 4096 multiplications a clock. With
  // 3/2 long products took 2 to 15 % longer.
  static constexpr int kBlockClocks = Config::kBlockM * Config::kBlockN * 128 / 4096 * 5 / 4;
  static constexpr int kMaxPeriod = 1 << 20;

  const GemmParams& params;
  const GroupTable& table;

  // Clears the CTA's share, by a warp.
  __device__ __forceinline__ void run() const {
    const int64_t row_bytes = int64_t(params.n) * (Config::kOutF32 ? 4 : 2);
    const unsigned period = clocks_of_piece(row_bytes);
    uint8_t* out = static_cast<uint8_t*>(params.out);
    unsigned due = clock();
    int64_t piece = blockIdx.x;  // of the rest, from this group on
    for (int group = 0; group < params.num_groups; ++group) {
      uint8_t* begin = out + table.row_end[group] * row_bytes;
      uint8_t* end = out + int64_t(group + 1) * params.rows_per_group * row_bytes;
      const int64_t num_pieces = (end - begin + kPieceBytes - 1) / kPieceBytes;
      for (; piece < num_pieces; piece += gridDim.x) {
        while (int(unsigned(clock()) - due) < 0) __nanosleep(64);
        clear(begin + piece * kPieceBytes, end);
        due += period;
      }
      piece -= num_pieces;
    }
  }

 private:
  // CTAs have the same share of tiles as of pieces, so it is the clocks of all tiles for a piece.
  __device__ __forceinline__ unsigned clocks_of_piece(int64_t row_bytes) const {
    int used_rows = 0;
    for (int group = threadIdx.x % 32; group < params.num_groups; group += 32) {
      used_rows += table.row_end[group] - table.row[group];
    }
    used_rows = __reduce_add_sync(0xffffffff, used_rows);
    const int64_t num_pieces = (params.m - used_rows) * row_bytes / kPieceBytes + 1;
    const int64_t num_tiles = int64_t(table.num_row_blocks) * ceil_div(params.n, Config::kBlockN);
    const int64_t clocks = num_tiles * ceil_div(params.k, 128) * kBlockClocks;
    return min(clocks / num_pieces, int64_t(kMaxPeriod));
  }

  // Rows have a multiple of 16 bytes.
  __device__ __forceinline__ static void clear(uint8_t* piece, const uint8_t* end) {
    uint8_t* word = piece + threadIdx.x % 32 * sizeof(uint4);
#pragma unroll
    for (int step = 0; step < kPieceBytes; step += kStepBytes) {
      if (word + step < end) *reinterpret_cast<uint4*>(word + step) = make_uint4(0, 0, 0, 0);
    }
  }
};

// By the producer's last warp.
template <typename Config, typename SharedStorage>
__device__ __forceinline__ void clear_unused_rows(const GemmParams& params, SharedStorage& shared) {
  if constexpr (grouping_of<Config>() == Grouping::kRows && !Config::kIsGated) {
    if (params.rows_per_group > 0 && params.clears_rest) {
      RowClearer<Config>{params, shared.groups}.run();
    }
  }
}

}  // namespace jax_fp8gemm
