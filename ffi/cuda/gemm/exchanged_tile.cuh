// A short tile of a group with its operands exchanged: the columns of rhs are the rows of wgmma,
// and the rows of the group are its columns. wgmma takes 64 rows at a time, but any multiple of 8
// columns. The bits are the same.
//
// A whole tile would take a seventh longer this way, because a thread then has 32 columns instead
// of two rows and reads the scale of each. A short tile has so many products less that it is
// faster (docs/experiments/grouped-short-tiles.md).
#pragma once

#include "gemm/batches.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/scheduler.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct ExchangedTile {
  using Tile = jax_fp8gemm::Tile<Config>;
  static constexpr int kColumns = 128;  // of a consumer, all under one scale
  static constexpr int kSubs = kColumns / 64;
  static constexpr int kStep = 16;      // of the widths of wgmma that are compiled
  static constexpr int kMostRows = 96;  // with more the whole tile is faster

  Batches<Config>& batches;
  const Work& work;
  const int column;                   // of out, of this consumer
  const uint32_t lhs_tile, rhs_tile;  // descriptors of its operands in stage 0

  __device__ __forceinline__ ExchangedTile(Batches<Config>& batches, const Work& work)
      : batches(batches),
        work(work),
        column(work.column + batches.consumer * kColumns),
        lhs_tile(wgmma_descriptor(batches.shared.lhs)),
        rhs_tile(batches.rhs_tile + __shfl_sync(0xffffffff, batches.consumer, 0) *
                                        (kColumns * Tile::kScaleBlock / 16)) {}

  // Computes and stores a tile of 1 .. kMostRows rows that has k-blocks. Columns from n on are
  // computed from whatever is there, and are not stored. NOTE: the compiler must know that `rows`
  // is uniform. A switch, or a branch that skips such columns, would keep the position in the ring
  // for each lane.
  template <int kRows = kMostRows>
  __device__ __forceinline__ void run(int rows) {
    if constexpr (kRows > kStep) {
      if (rows <= kRows - kStep) return run<kRows - kStep>(rows);
    }
    float sums[kSubs][kRows / 2];
    multiply<kRows>(sums);
    store<kRows>(sums, rows);
  }

 private:
  // Multiplies and promotes the k-blocks as MainLoop::multiply_by_one does.
  template <int kRows>
  __device__ __forceinline__ void multiply(float (&sums)[kSubs][kRows / 2]) {
    float accum[kRows / 2], scale[kRows / 4];
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums[sub][i] = 0.f;
    }
    uint32_t shift = row_scale_shift(batches.params.lhs_rows, work.lhs_row, work.first_k_block);
    batches.wait();
#pragma unroll 1
    for (int k_block = 1; k_block <= batches.num_k_blocks; ++k_block) {
      const uint32_t stage = batches.ring.stage;
      const uint32_t lhs = lhs_tile + stage * (Tile::kLhsBytes / 16);
      const uint32_t rhs = rhs_tile + stage * (Tile::kRhsBytes / 16);
      bool is_full;
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        multiply_k_block<kRows, true>(accum, rhs + sub * 512, lhs);
        if (sub == 0) read_scales<kRows>(scale, stage, shift);
        wgmma_wait<0>();
        if (sub == kSubs - 1) {
          batches.release(stage);
          batches.ring.advance();
          shift = (shift + uint32_t(batches.params.lhs_rows)) % 4;
          is_full = batches.is_ready();
        }
        wgmma_pin(accum);
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i)
          sums[sub][i] = __fmaf_rn(scale[i / 4 * 2 + i % 2], accum[i], sums[sub][i]);
      }
      if (!is_full && k_block < batches.num_k_blocks) batches.wait();
    }
  }

  // The products of scales of this thread's rows of the group, 8j + 2 (lane % 4) and the next.
  template <int kRows>
  __device__ __forceinline__ void read_scales(float (&scale)[kRows / 4], uint32_t stage,
                                              uint32_t shift) {
    const float rhs_scale = batches.shared.rhs_scale[stage][batches.consumer];
    const float* lhs_scale = batches.shared.lhs_scale[stage] + shift + 2 * (batches.lane % 4);
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i)
      scale[i] = __fmul_rn(lhs_scale[i / 2 * 8 + i % 2], rhs_scale);
  }

  // Stores the first `rows` rows: bf16 through this consumer's slabs, 64 columns at a time, so that
  // lanes write 16 bytes each; f32 from registers.
  template <int kRows>
  __device__ __forceinline__ void store(const float (&sums)[kSubs][kRows / 2], int rows) {
    const GemmParams& params = batches.params;
    const int thread = thread_index(), warp = thread / 32 % 4, lane = thread % 32;
    uint8_t* slab = batches.shared.slabs[batches.consumer];
    static_assert(Config::kOutF32 ||
                  kRows * Tile::kSlabRowBytes <= Config::kNumSlabs * Tile::kSlabBytes);
    // Wait until the stores by TMA that used these slabs before have read them.
    if (!Config::kOutF32 && warp == 0 && elect_one()) tma_store_wait_read<0>();
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      const int first = column + sub * 64;
      if constexpr (Config::kOutF32) {
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) {
          const int row = i / 4 * 8 + 2 * (lane % 4) + i % 2;
          const int n_idx = first + warp * 16 + lane / 4 + i / 2 % 2 * 8;
          if (row < rows && n_idx < params.n) {
            static_cast<float*>(params.out)[size_t(work.row + row) * params.n + n_idx] =
                sums[sub][i];
          }
        }
      } else {
        named_barrier_sync(1 + batches.consumer, 128);
        write_slab_transposed<kRows>(slab, sums[sub], warp, lane);
        named_barrier_sync(1 + batches.consumer, 128);
        const int chunk = lane % 8, n_idx = first + chunk * 8;
#pragma unroll 1
        for (int row = warp * 4 + lane / 8; row < rows; row += 16) {
          const uint4 columns =
              *reinterpret_cast<const uint4*>(slab + row * 128 + (chunk ^ (row % 8)) * 16);
          if (n_idx < params.n) {
            uint16_t* out = static_cast<uint16_t*>(params.out);
            *reinterpret_cast<uint4*>(out + size_t(work.row + row) * params.n + n_idx) = columns;
          }
        }
      }
    }
  }
};

}  // namespace jax_fp8gemm
