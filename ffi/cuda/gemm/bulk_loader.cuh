// The producer's first warp, and its third one where two share the work: loads operands and scales
// into the ring of stages.
#pragma once

#include "gemm/pipeline.cuh"
#include "gemm/scales.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/tile.cuh"
#include "ptx/tma.cuh"

namespace jax_fp8gemm {

template <typename Config, typename Scheduler>
struct BulkLoader {
  using Tile = jax_fp8gemm::Tile<Config>;
  using Ring = typename Tile::Ring;

  const GemmParams& params;
  typename Tile::SharedStorage& shared;
  const int loader;  // of Tile::kNumLoaders

  // Copies, by one lane, everything that is copied in bulk. kIsAligned: has_scale_map(). NOTE:
  // every instruction of this lane in a k-block costs, although it mostly waits: with one branch
  // here large products took 2-5 % longer.
  template <bool kIsAligned>
  __device__ __forceinline__ void run() {
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
      } else if (grouping_of<Config>() == Grouping::kRows && count_parts(work) < kNumParts) {
        load_k_blocks<kIsAligned, true>(work, 0, work.num_k_blocks, rank, ring);
      } else if constexpr (Tile::kNumLoaders > 1) {
        Ring own = ring;
        own.skip(loader);
        load_k_blocks<kIsAligned>(work, loader, work.num_k_blocks, rank, own);
        ring.skip(work.num_k_blocks);
      } else {
        load_k_blocks<kIsAligned>(work, 0, work.num_k_blocks, rank, ring);
      }
    }
    if constexpr (Config::kClusterSize > 1) stay_while_shared(ring);
  }

 private:
  // The output of a tile is prefetched when this many k-blocks are left: early enough to arrive,
  // and late enough to stay in the L2.
  static constexpr int kPrefetchAhead = 8;

  // The parts of a tile's lhs, and how many of them the rows of a group reach.
  static constexpr int kPartBytes = Tile::kPartRows * Tile::kScaleBlock;
  static constexpr int kNumParts = Config::kBlockM / Tile::kPartRows;
  __device__ __forceinline__ static int count_parts(const Work& work) {
    return ceil_div(work.row_end - work.row, Tile::kPartRows);
  }

  // Whether a tile has rows that lhs does not have, and the rows that lhs has in such tiles.
  __device__ __forceinline__ bool is_short(const Work& work) const {
    return num_short_rows() > 0 && work.lhs_row + Config::kBlockM > params.m;
  }
  __device__ __forceinline__ int num_short_rows() const { return params.m % Config::kBlockM; }

  // The map by which this CTA loads its part of a short tile of lhs; null if lhs has no row there.
  __device__ __forceinline__ const TensorMap* short_map(uint32_t rank) const {
    if constexpr (Config::kClusterN == 1) {
      return &params.lhs_part;
    } else {
      constexpr int kRows = Config::kBlockM / Config::kClusterN;
      const int num_rows = num_short_rows() - int(rank) * kRows;
      return num_rows >= kRows ? &params.lhs : num_rows > 0 ? &params.lhs_part : nullptr;
    }
  }

  // Waits until all CTAs of the cluster have given back all stages. Until then others write to this
  // CTA and arrive on its barriers, so it must not leave. NOTE: no other warp or lane waits. When
  // those without work stayed to the end, at a barrier of the cluster or of the CTA, kernels took 2
  // to 4 % longer.
  __device__ __forceinline__ void stay_while_shared(Ring ring) const {
#pragma unroll 1
    for (int i = 0; i < Config::kNumStages; ++i) {
      mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      ring.advance();
    }
  }

  // Loads k-blocks first .. end-1 of a tile, or every second one if there are two loaders, from the
  // stage of the first on. kInParts: only the parts of lhs that have rows of the group are loaded.
  // Of a short tile, only the rows that lhs has. What an earlier tile left behind these rows
  // reaches only rows of the result that are not stored.
  template <bool kIsAligned, bool kInParts = false>
  __device__ __forceinline__ void load_k_blocks(const Work& work, int first, int end, uint32_t rank,
                                                Ring& ring) const {
    const int num_parts = count_parts(work);
    const TensorMap* lhs = &params.lhs;
    uint32_t lhs_bytes = kInParts ? num_parts * kPartBytes : Tile::kLhsBytes;
    if (Tile::kLoadsShort && is_short(work)) {
      lhs = short_map(rank);
      lhs_bytes = num_short_rows() * Tile::kScaleBlock;
    }
#pragma unroll 1
    for (int j = first; j < end; j += Tile::kNumLoaders) {
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
      if constexpr (Config::kQuantizesLhs) lhs_bytes = lhs_scale_bytes = 0;
      mbarrier_arrive_expect_tx(
          full, lhs_bytes + Tile::kRhsBytes + Tile::kRhsScaleBytes + lhs_scale_bytes);
      if constexpr (Config::kQuantizesLhs) {
        // LhsQuantizer stores them.
      } else if constexpr (kInParts) {
#pragma unroll 1
        for (int part = 0; part < num_parts; ++part) {
          tma_load_2d(&params.lhs_part, full, shared.lhs[ring.stage] + part * kPartBytes,
                      k_block * Tile::kScaleBlock, work.lhs_row + part * Tile::kPartRows);
        }
      } else if (Config::kClusterN == 1 || lhs != nullptr) {
        load_operand<Config::kClusterN, Tile::kLhsBytes>(lhs, full, shared.lhs[ring.stage], k_block,
                                                         work.lhs_row, rank);
      }
#pragma unroll
      for (int box = 0; box < Tile::kRhsBoxes; ++box) {
        constexpr int kBoxBytes = Tile::kRhsBytes / Tile::kRhsBoxes;
        load_operand<Config::kClusterM, kBoxBytes>(
            &params.rhs, full, shared.rhs[ring.stage] + box * kBoxBytes, k_block,
            work.rhs_row + (box > 0 ? params.n / 2 : 0), rank);
      }
      if constexpr (Config::kQuantizesLhs) {
        // So are their scales.
      } else if constexpr (kIsAligned) {
        tma_load_2d(&params.lhs_scale_map, full, shared.lhs_scale[ring.stage], work.lhs_row & ~3,
                    k_block);
      } else {
        row_scales(work, j).copy(full, shared.lhs_scale[ring.stage], params.lhs_scale);
      }
      if constexpr (Config::kIs1d1d) {
        tma_load_2d(&params.rhs_scale_map, full, shared.rhs_scale[ring.stage], work.column,
                    k_block);
      }
#pragma unroll
      for (int i = 0; i < Tile::kNumLoaders; ++i) ring.advance();
    }
  }

  // Brings what the tile's sums are added to into the L2, where the additions are made.
  __device__ __forceinline__ void prefetch_out(const Work& work) const {
    constexpr int kSlabColumns = Tile::kSlabRowBytes / 4;  // kAccumulate: of f32
    constexpr int kBoxRows = Config::kTransposesOut ? 32 : kSlabRows;
#pragma unroll 1
    for (int row = 0; row < Config::kBlockM; row += kBoxRows) {
#pragma unroll 1
      for (int column = 0; column < Config::kBlockN; column += kSlabColumns) {
        if constexpr (Config::kTransposesOut) {
          tma_prefetch_2d(&params.out_map, work.row + row,
                          work.first_out_row + work.column + column);
        } else {
          tma_prefetch_2d(&params.out_map, work.column + column, work.row + row);
        }
      }
    }
  }

  // k_block: of the tile.
  __device__ __forceinline__ RowScales<Config::kBlockM> row_scales(const Work& work,
                                                                   int k_block) const {
    return {params.lhs_rows, ceil_div(params.k, 128), work.lhs_row, work.first_k_block + k_block};
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
