// The producer's second warp: stores the scales that no bulk copy can move.
#pragma once

#include "gemm/pipeline.cuh"
#include "gemm/scales.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/tile.cuh"

namespace jax_fp8gemm {

template <typename Config, typename Scheduler>
struct ScaleWriter {
  using Tile = jax_fp8gemm::Tile<Config>;
  using ColumnScales = BlockScales<Tile::kNumColumnBlocks>;
  static constexpr int kChunk = ColumnScales::kChunk;

  const GemmParams& params;
  typename Tile::SharedStorage& shared;

  // Whether there are such scales. In 1d2d each column block has one.
  __device__ __forceinline__ static bool is_needed(const GemmParams& params) {
    return !Config::kIs1d1d || has_rest(params.lhs_rows, ceil_div(params.k, 128));
  }

  // Stores by all lanes: in 1d2d one float for each column block of the tile, and the last scales
  // of rows where they fill no 16 bytes. NOTE: when the consumers loaded scales into registers, a
  // k-block ahead, the kernel was 15-20 % slower: such loads queue behind the operands of several
  // stages on their way from the L2.
  __device__ __forceinline__ void run() {
    Scheduler scheduler(params, shared);
    ColumnScales scales;
    typename Tile::Ring ring;
    if constexpr (!Config::kIs1d1d) prefetch_tile(scales, scheduler, scheduler.tile);
    for (int next; scheduler.tile < scheduler.count(); scheduler.tile = next) {
      const Work work = scheduler.locate(scheduler.tile);
      int k_block = 0;
      if constexpr (Config::kIs1d1d) {
        next = scheduler.hand_out(scheduler.take());
      } else {
        // A chunk of scales is loaded while the chunk before it is stored. The first chunk of the
        // next tile is loaded while the last chunk of this tile is stored.
        for (; k_block + kChunk < work.num_k_blocks; k_block += kChunk) {
          scales.advance();
          prefetch_chunk(scales, work, k_block + kChunk);
          write(work, k_block, k_block + kChunk, scales, ring);
        }
        scales.advance();
        const int taken = scheduler.take();
        const int hand_out_at = max(k_block, work.num_k_blocks - Scheduler::kHandOutAhead);
        write(work, k_block, hand_out_at, scales, ring);
        k_block = hand_out_at;
        next = scheduler.hand_out(taken);
        prefetch_tile(scales, scheduler, next);
      }
      write(work, k_block, work.num_k_blocks, scales, ring);
    }
  }

 private:
  // Stores the scales of k-blocks first .. end-1 of a tile, in 1d2d all in one chunk.
  __device__ __forceinline__ void write(const Work& work, int first, int end,
                                        const ColumnScales& scales,
                                        typename Tile::Ring& ring) const {
    const int lane = thread_index() % 32;
    const int num_k_blocks = ceil_div(params.k, 128);
    const bool is_rest_left = has_rest(params.lhs_rows, num_k_blocks);
#pragma unroll 1
    for (int k_block = first; k_block < end; ++k_block) {
      mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      // Up to 3 scales are left. If there is one row, they belong to as many k-blocks.
      const bool stores_rest = is_rest_left && work.first_k_block + k_block >= num_k_blocks - 3;
      if (stores_rest) {
        RowScales<Config::kBlockM>(params.lhs_rows, num_k_blocks, work.lhs_row,
                                   work.first_k_block + k_block)
            .store_rest(shared.lhs_scale[ring.stage], params.lhs_scale, lane);
      }
      if constexpr (Tile::kSplitSub) {
        store_parts(shared.rhs_scale[ring.stage], work.column % 128, scales, k_block, lane);
        __syncwarp();
      } else if (stores_rest) {
        __syncwarp();
      }
      if (lane == k_block % kChunk) {
        if constexpr (!Config::kIs1d1d && !Tile::kSplitSub) {
#pragma unroll
          for (int i = 0; i < Tile::kNumColumnBlocks; ++i)
            shared.rhs_scale[ring.stage][i] = scales.chunk[i];
        }
        mbarrier_arrive(&shared.full[ring.stage]);
      }
      ring.advance();
    }
  }

  // Stores, by the lanes of the warp, the scale of every part of the tile (see Tile::kSplitSub).
  // `offset`: of the tile in its first column block.
  __device__ __forceinline__ static void store_parts(float* smem, int offset,
                                                     const ColumnScales& scales, int k_block,
                                                     int lane) {
    static_assert(!Tile::kSplitSub || Tile::kColumnScales <= 32, "a lane stores one scale");
    const int column = offset + lane * Tile::kColumnStep;
    float scale = 0.f;
#pragma unroll
    for (int i = 0; i < Tile::kNumColumnBlocks; ++i) {
      const float block_scale = __shfl_sync(0xffffffff, scales.chunk[i], k_block % kChunk);
      if (column >= i * 128) scale = block_scale;
    }
    if (lane < Tile::kColumnScales) smem[lane] = scale;
  }

  // Starts loading the block scales of a tile's next kChunk k-blocks from k_block on.
  __device__ __forceinline__ void prefetch_chunk(ColumnScales& scales, const Work& work,
                                                 int k_block) {
    scales.prefetch(params.rhs_scale, params.n, ceil_div(params.k, 128), work.rhs_scale_row,
                    work.column, work.first_k_block + k_block,
                    Config::kIsGated ? params.n / 2 / 128 : 1);
  }

  // Starts loading the first scales of a tile, if that tile exists.
  __device__ __forceinline__ void prefetch_tile(ColumnScales& scales, Scheduler scheduler,
                                                int tile) {
    if (tile >= scheduler.count()) return;
    const Work work = scheduler.locate(tile);
    if (work.num_k_blocks > 0) prefetch_chunk(scales, work, 0);
  }
};

}  // namespace jax_fp8gemm
