// The producer: loads operands and scales into the ring of stages.
#pragma once

#include "pipeline.cuh"
#include "scales.cuh"
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
  int num_k_blocks;

  // The producer's first warp, one lane: everything that TMA can load.
  __device__ __forceinline__ void load_by_tma() {
    Scheduler scheduler(params.m, params.n, params.raster);
    const uint32_t rank = Config::kClusterSize > 1 ? cluster_rank() : 0;
    const bool is_lhs_scale_aligned = num_copy_lanes(params.m) == 0;
    Ring ring;
    while (scheduler.next_block()) {
      const int row = scheduler.block_m_idx * Config::kBlockM;
      const int column = scheduler.block_n_idx * Config::kBlockN;
#pragma unroll 1
      for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
        Barrier* full = &shared.full[ring.stage];
        mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
        // The consumers read the stage's scales by ordinary loads: order those before the TMA
        // below. It suffices that the fence lies on the path from the reads to the write (PTX ISA,
        // memory consistency model, causality order). NOTE: nobody waits here; in the consumers the
        // same fence cost 2-5 %.
        fence_proxy_async_shared();
        mbarrier_arrive_expect_tx(full, Tile::kLhsBytes + Tile::kRhsBytes + Tile::kRhsScaleBytes +
                                            (is_lhs_scale_aligned ? Tile::kLhsScaleBytes : 0));
        load_operand<Config::kClusterN, Tile::kLhsBytes>(&params.lhs, full, shared.lhs[ring.stage],
                                                         k_block, row, rank);
        load_operand<Config::kClusterM, Tile::kRhsBytes>(&params.rhs, full, shared.rhs[ring.stage],
                                                         k_block, column, rank);
        if (is_lhs_scale_aligned) {
          tma_load_2d(&params.lhs_scale_map, full, shared.lhs_scale[ring.stage], row, k_block);
        }
        if constexpr (Config::kIs1d1d) {
          tma_load_2d(&params.rhs_scale_map, full, shared.rhs_scale[ring.stage], column, k_block);
        }
        ring.advance();
      }
    }
  }

  // The producer's second warp: the scales that TMA cannot load. In 1d2d one float per column block
  // of the tile, and, where m is no multiple of 4, those of the rows. NOTE: when the consumers
  // loaded scales into registers, a k-block ahead, the kernel was 15-20 % slower: such loads queue
  // behind the operands of several stages on their way from the L2.
  __device__ __forceinline__ void load_scales() {
    const int lane = threadIdx.x % 32;
    const int num_lanes = num_copy_lanes(params.m);
    Scheduler scheduler(params.m, params.n, params.raster);
    ColumnScales block_scales;
    Ring ring;
    if constexpr (!Config::kIs1d1d) prefetch_chunk(block_scales, scheduler.peek_block_n(), 0);
    while (scheduler.next_block()) {
      const int row = scheduler.block_m_idx * Config::kBlockM;
      const float* lhs_scale = params.lhs_scale;
#pragma unroll 1
      for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
        if (!Config::kIs1d1d && k_block % 32 == 0) {
          const bool is_last = k_block + 32 >= num_k_blocks;
          block_scales.advance();
          prefetch_chunk(block_scales, is_last ? scheduler.peek_block_n() : scheduler.block_n_idx,
                         is_last ? 0 : k_block + 32);
        }
        mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
        if (lane < num_lanes) {
          copy_row_scales<Config::kBlockM>(shared.lhs_scale[ring.stage], lhs_scale, row, params.m,
                                           lane);
          cp_async_arrive(&shared.full[ring.stage]);
        }
        lhs_scale += params.m;
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

  // Starts loading the block scales of k-blocks k_block .. k_block + 31 of the tiles at
  // `block_n_idx`, if there is one.
  __device__ __forceinline__ void prefetch_chunk(ColumnScales& scales, int block_n_idx,
                                                 int k_block) {
    scales.prefetch(params.rhs_scale, params.n, num_k_blocks, block_n_idx * Config::kBlockN,
                    k_block);
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
