// The producer: loads operands and scales into the ring of stages.
#pragma once

#include "pipeline.cuh"
#include "scales.cuh"
#include "scheduler.cuh"
#include "tile.cuh"
#include "tma.cuh"

namespace jax_fp8gemm {

template <typename Config, typename Scheduler>
struct Producer {
  using Tile = jax_fp8gemm::Tile<Config>;
  using Ring = RingCursor<Config::kNumStages>;
  using ColumnScales = BlockScales<Tile::kNumColumnBlocks>;

  const GemmParams& params;
  typename Tile::SharedStorage& shared;

  // Whether there are scales that the second warp stores: in 1d2d one a column block.
  __device__ __forceinline__ static bool stores_scales(const GemmParams& params) {
    return !Config::kIs1d1d || has_rest(params.lhs_rows, ceil_div(params.k, 128));
  }

  // The producer's first warp, of which one lane starts all bulk copies.
  __device__ __forceinline__ void load_in_bulk() {
    Scheduler scheduler(params, shared);
    Ring ring;  // the elected lane's, which is always the same one
    for (int i = scheduler.first(); i < scheduler.count(); i += scheduler.stride()) {
      const Work work = scheduler.locate(i);
      if (elect_one()) load_tile(work, ring);
      __syncwarp();
    }
  }

  // The producer's second warp: in 1d2d one float per column block of the tile; and the last scales
  // of rows, where they fill no 16 bytes. NOTE: when the consumers loaded scales into registers, a
  // k-block ahead, the kernel was 15-20 % slower: such loads queue behind the operands of several
  // stages on their way from the L2.
  __device__ __forceinline__ void store_scales() {
    const int lane = threadIdx.x % 32;
    const int num_k_blocks = ceil_div(params.k, 128);
    const bool is_rest_left = has_rest(params.lhs_rows, num_k_blocks);
    Scheduler scheduler(params, shared);
    ColumnScales block_scales;
    Ring ring;
    if constexpr (!Config::kIs1d1d) prefetch_tile(block_scales, scheduler, scheduler.first());
    for (int i = scheduler.first(); i < scheduler.count(); i += scheduler.stride()) {
      const Work work = scheduler.locate(i);
#pragma unroll 1
      for (int k_block = 0; k_block < work.num_k_blocks; ++k_block) {
        if (!Config::kIs1d1d && k_block % 32 == 0) {
          block_scales.advance();
          if (k_block + 32 < work.num_k_blocks) {
            prefetch_chunk(block_scales, work, k_block + 32);
          } else {
            prefetch_tile(block_scales, scheduler, i + scheduler.stride());
          }
        }
        mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
        if (is_rest_left && work.first_k_block + k_block == num_k_blocks - 1) {
          row_scales(work, k_block)
              .store_rest(shared.lhs_scale[ring.stage], params.lhs_scale, params.lhs_rows,
                          num_k_blocks, lane);
          __syncwarp();
        }
        if (lane == k_block % 32) {
          if constexpr (!Config::kIs1d1d) {
#pragma unroll
            for (int i = 0; i < Tile::kNumColumnBlocks; ++i)
              shared.rhs_scale[ring.stage][i] = block_scales.chunk[i];
          }
          mbarrier_arrive(&shared.full[ring.stage]);
        }
        ring.advance();
      }
    }
  }

 private:
  __device__ __forceinline__ void load_tile(const Work& work, Ring& ring) {
    const uint32_t rank = Config::kClusterSize > 1 ? cluster_rank() : 0;
#pragma unroll 1
    for (int i = 0; i < work.num_k_blocks; ++i) {
      const int k_block = work.first_k_block + i;
      const auto lhs_scale = row_scales(work, i);
      Barrier* full = &shared.full[ring.stage];
      mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      // The consumers read the stage's scales by ordinary loads: order those before the copies
      // below. It suffices that the fence lies on the path from the reads to the write (PTX ISA,
      // memory consistency model, causality order). NOTE: nobody waits here; in the consumers the
      // same fence cost 2-5 %.
      fence_proxy_async_shared();
      // A tile of a cluster may begin past the columns.
      const int num_columns =
          Config::kIs1d1d ? max(0, min(Config::kBlockN, params.n - work.column)) : 0;
      mbarrier_arrive_expect_tx(
          full, Tile::kLhsBytes + Tile::kRhsBytes + lhs_scale.bytes() + num_columns * 4);
      load_operand<Config::kClusterN, Tile::kLhsBytes>(&params.lhs, full, shared.lhs[ring.stage],
                                                       k_block, work.lhs_row, rank);
      load_operand<Config::kClusterM, Tile::kRhsBytes>(&params.rhs, full, shared.rhs[ring.stage],
                                                       k_block, work.rhs_row, rank);
      lhs_scale.copy(full, shared.lhs_scale[ring.stage], params.lhs_scale);
      if constexpr (Config::kIs1d1d) {
        if (num_columns > 0) {
          bulk_load(full, shared.rhs_scale[ring.stage],
                    params.rhs_scale + size_t(k_block) * params.n + work.column, num_columns * 4);
        }
      }
      ring.advance();
    }
  }

  // k_block: of the tile.
  __device__ __forceinline__ RowScales<Config::kBlockM> row_scales(const Work& work,
                                                                   int k_block) const {
    return {params.lhs_rows, ceil_div(params.k, 128), work.lhs_row, work.first_k_block + k_block};
  }

  // Starts loading the block scales of k-blocks k_block .. k_block + 31 of a tile.
  __device__ __forceinline__ void prefetch_chunk(ColumnScales& scales, const Work& work,
                                                 int k_block) {
    scales.prefetch(params.rhs_scale, params.n, ceil_div(params.k, 128), work.rhs_scale_row,
                    work.column, k_block);
  }

  // Starts with the first ones of the i-th tile, if there is one.
  __device__ __forceinline__ void prefetch_tile(ColumnScales& scales, Scheduler scheduler, int i) {
    if (i >= scheduler.count()) return;
    const Work work = scheduler.locate(i);
    if (work.num_k_blocks > 0) prefetch_chunk(scales, work, 0);
  }

  // Loads a tile of 128-byte rows; if kShare CTAs share it, loads this CTA's part of it for all of
  // them.
  template <int kShare, int kBytes>
  __device__ __forceinline__ static void load_operand(const TensorMap* map, Barrier* full,
                                                      uint8_t* tile, int k_block, int row,
                                                      uint32_t rank) {
    if constexpr (kShare == 1) {
      tma_load_2d(map, full, tile, k_block * Tile::kScaleBlock, row);
    } else {
      const int part = rank * (kBytes / kShare);
      tma_load_2d_multicast(map, full, tile + part, k_block * Tile::kScaleBlock,
                            row + part / Tile::kScaleBlock, (1 << kShare) - 1);
    }
  }
};

}  // namespace jax_fp8gemm
