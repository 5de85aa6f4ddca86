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

  // The producer's first warp, one lane: everything that is copied in bulk. kIsAligned: lhs_rows is
  // a multiple of 4, so that row scales have a tensor map. NOTE: what this lane does in a k-block
  // costs, although it mostly waits: with a branch here large products took 2-5 % longer.
  template <bool kIsAligned>
  __device__ __forceinline__ void load_in_bulk() {
    Scheduler scheduler(params, shared);
    const uint32_t rank = Config::kClusterSize > 1 ? cluster_rank() : 0;
    Ring ring;
    for (; scheduler.tile < scheduler.count(); scheduler.next()) {
      const Work work = scheduler.locate(scheduler.tile);
      if constexpr (Config::kAccumulate && Config::kNumSlabs > 0) {
        const int late = max(work.num_k_blocks - kPrefetchAhead, 0);
        load_k_blocks<kIsAligned>(work, 0, late, rank, ring);
        prefetch_out(work);
        load_k_blocks<kIsAligned>(work, late, work.num_k_blocks, rank, ring);
      } else {
        load_k_blocks<kIsAligned>(work, 0, work.num_k_blocks, rank, ring);
      }
    }
  }

  // The producer's second warp: in 1d2d one float per column block of the tile; and the last scales
  // of rows, where they fill no 16 bytes. NOTE: when the consumers loaded scales into registers, a
  // k-block ahead, the kernel was 15-20 % slower: such loads queue behind the operands of several
  // stages on their way from the L2.
  __device__ __forceinline__ void store_scales() {
    const int lane = thread_index() % 32;
    const int num_k_blocks = ceil_div(params.k, 128);
    const bool is_rest_left = has_rest(params.lhs_rows, num_k_blocks);
    Scheduler scheduler(params, shared);
    ColumnScales block_scales;
    Ring ring;
    if constexpr (!Config::kIs1d1d) prefetch_tile(block_scales, scheduler, scheduler.tile);
    for (int next; scheduler.tile < scheduler.count(); scheduler.tile = next) {
      const Work work = scheduler.locate(scheduler.tile);
      next = scheduler.hand_out();
#pragma unroll 1
      for (int k_block = 0; k_block < work.num_k_blocks; ++k_block) {
        if (!Config::kIs1d1d && k_block % 32 == 0) {
          block_scales.advance();
          if (k_block + 32 < work.num_k_blocks) {
            prefetch_chunk(block_scales, work, k_block + 32);
          } else {
            prefetch_tile(block_scales, scheduler, next);
          }
        }
        mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
        // Up to 3 scales are left, of as many k-blocks if there is one row.
        if (is_rest_left && work.first_k_block + k_block >= num_k_blocks - 3) {
          row_scales(work, k_block)
              .store_rest(shared.lhs_scale[ring.stage], params.lhs_scale, lane);
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
  // k-blocks from the end of a tile at which its output is prefetched: early enough to arrive, late
  // enough to stay.
  static constexpr int kPrefetchAhead = 8;

  // Loads k-blocks first .. end-1 of a tile.
  template <bool kIsAligned>
  __device__ __forceinline__ void load_k_blocks(const Work& work, int first, int end, uint32_t rank,
                                                Ring& ring) const {
#pragma unroll 1
    for (int j = first; j < end; ++j) {
      const int k_block = work.first_k_block + j;
      Barrier* full = &shared.full[ring.stage];
      mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      // The consumers read the stage's scales by ordinary loads: order those before the copies
      // below. It suffices that the fence lies on the path from the reads to the write (PTX ISA,
      // memory consistency model, causality order). NOTE: nobody waits here; in the consumers the
      // same fence cost 2-5 %.
      fence_proxy_async_shared();
      uint32_t lhs_scale_bytes = Tile::kLhsScaleBytes;
      if constexpr (!kIsAligned) lhs_scale_bytes = row_scales(work, j).bytes();
      mbarrier_arrive_expect_tx(
          full, Tile::kLhsBytes + Tile::kRhsBytes + Tile::kRhsScaleBytes + lhs_scale_bytes);
      load_operand<Config::kClusterN, Tile::kLhsBytes>(&params.lhs, full, shared.lhs[ring.stage],
                                                       k_block, work.lhs_row, rank);
      load_operand<Config::kClusterM, Tile::kRhsBytes>(&params.rhs, full, shared.rhs[ring.stage],
                                                       k_block, work.rhs_row, rank);
      if constexpr (kIsAligned) {
        tma_load_2d(&params.lhs_scale_map, full, shared.lhs_scale[ring.stage], work.lhs_row & ~3,
                    k_block);
      } else {
        row_scales(work, j).copy(full, shared.lhs_scale[ring.stage], params.lhs_scale);
      }
      if constexpr (Config::kIs1d1d) {
        tma_load_2d(&params.rhs_scale_map, full, shared.rhs_scale[ring.stage], work.column,
                    k_block);
      }
      ring.advance();
    }
  }

  // Brings what the tile's sums are added to into the L2, where the additions are made.
  __device__ __forceinline__ void prefetch_out(const Work& work) const {
    constexpr int kSlabColumns = Tile::kSlabRowBytes / 4;  // kAccumulate: of f32
#pragma unroll 1
    for (int row = 0; row < Config::kBlockM; row += Tile::kSlabRows) {
#pragma unroll 1
      for (int column = 0; column < Config::kBlockN; column += kSlabColumns) {
        tma_prefetch_2d(&params.out_map, work.column + column, work.row + row);
      }
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

  // Starts with the first ones of a tile, if there is that tile.
  __device__ __forceinline__ void prefetch_tile(ColumnScales& scales, Scheduler scheduler,
                                                int tile) {
    if (tile >= scheduler.count()) return;
    const Work work = scheduler.locate(tile);
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
