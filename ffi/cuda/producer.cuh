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

  // The producer's first warp, of which one lane asks TMA for everything that it can load.
  __device__ __forceinline__ void load_by_tma() {
    Scheduler scheduler(params, shared);
    const bool is_lhs_scale_aligned = num_copy_lanes(params.lhs_rows) == 0;
    Ring ring;  // the elected lane's, which is always the same one
    for (int i = scheduler.first(); i < scheduler.count(); i += scheduler.stride()) {
      const Work work = scheduler.locate(i);
      if (elect_one()) load_tile(work, is_lhs_scale_aligned, ring);
      __syncwarp();
    }
  }

  // The producer's second warp: the scales that TMA cannot load. In 1d2d one float per column block
  // of the tile, and, where their rows are no multiple of 4, those of the rows. NOTE: when the
  // consumers loaded scales into registers, a k-block ahead, the kernel was 15-20 % slower: such
  // loads queue behind the operands of several stages on their way from the L2.
  __device__ __forceinline__ void load_scales() {
    const int lane = threadIdx.x % 32;
    const int num_lanes = num_copy_lanes(params.lhs_rows);
    Scheduler scheduler(params, shared);
    ColumnScales block_scales;
    Ring ring;
    if constexpr (!Config::kIs1d1d) prefetch_tile(block_scales, scheduler, scheduler.first());
    for (int i = scheduler.first(); i < scheduler.count(); i += scheduler.stride()) {
      const Work work = scheduler.locate(i);
      const float* lhs_scale = params.lhs_scale + size_t(work.first_k_block) * params.lhs_rows;
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
        if (lane < num_lanes) {
          copy_row_scales<Config::kBlockM>(shared.lhs_scale[ring.stage], lhs_scale, work.lhs_row,
                                           params.lhs_rows, lane);
          cp_async_arrive(&shared.full[ring.stage]);
        }
        lhs_scale += params.lhs_rows;
        if (!Config::kIs1d1d && lane == k_block % 32) {
#pragma unroll
          for (int i = 0; i < Tile::kNumColumnBlocks; ++i)
            shared.rhs_scale[ring.stage][i] = block_scales.chunk[i];
          mbarrier_arrive(&shared.full[ring.stage]);
        }
        ring.advance();
      }
    }
    cp_async_wait_all();
  }

 private:
  __device__ __forceinline__ void load_tile(const Work& work, bool is_lhs_scale_aligned,
                                            Ring& ring) {
    const uint32_t rank = Config::kClusterSize > 1 ? cluster_rank() : 0;
#pragma unroll 1
    for (int i = 0; i < work.num_k_blocks; ++i) {
      const int k_block = work.first_k_block + i;
      Barrier* full = &shared.full[ring.stage];
      mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      // The consumers read the stage's scales by ordinary loads: order those before the TMA below.
      // It suffices that the fence lies on the path from the reads to the write (PTX ISA, memory
      // consistency model, causality order). NOTE: nobody waits here; in the consumers the same
      // fence cost 2-5 %.
      fence_proxy_async_shared();
      mbarrier_arrive_expect_tx(full, Tile::kLhsBytes + Tile::kRhsBytes + Tile::kRhsScaleBytes +
                                          (is_lhs_scale_aligned ? Tile::kLhsScaleBytes : 0));
      load_operand<Config::kClusterN, Tile::kLhsBytes>(&params.lhs, full, shared.lhs[ring.stage],
                                                       k_block, work.lhs_row, rank);
      load_operand<Config::kClusterM, Tile::kRhsBytes>(&params.rhs, full, shared.rhs[ring.stage],
                                                       k_block, work.rhs_row, rank);
      if (is_lhs_scale_aligned) {
        tma_load_2d(&params.lhs_scale_map, full, shared.lhs_scale[ring.stage],
                    Tile::kIsRagged ? work.lhs_row & ~3 : work.lhs_row, k_block);
      }
      if constexpr (Config::kIs1d1d) {
        tma_load_2d(&params.rhs_scale_map, full, shared.rhs_scale[ring.stage], work.column,
                    k_block);
      }
      ring.advance();
    }
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
