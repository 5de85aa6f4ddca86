// A consumer warpgroup: multiplies its rows of each tile on the tensor cores, promotes and stores.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/exchanged_tile.cuh"
#include "gemm/gated_epilogue.cuh"
#include "gemm/main_loop.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/transposed_epilogue.cuh"

namespace jax_fp8gemm {

template <typename Config, typename Scheduler>
struct Consumer {
  using Tile = jax_fp8gemm::Tile<Config>;

  MainLoop<Config> loop;

  __device__ __forceinline__ Consumer(const GemmParams& params,
                                      typename Tile::SharedStorage& shared, int consumer)
      : loop{Batches<Config>(params, shared, consumer)} {}

  __device__ __forceinline__ void run() {
    Batches<Config>& batches = loop.batches;
    const GemmParams& params = batches.params;
    Scheduler scheduler(params, batches.shared);
    // NOTE: count() is called again for each tile. With its value kept over a tile, 1d1d took 3-6 %
    // longer.
    for (; scheduler.has_tile(scheduler.count()); scheduler.next(batches.lane)) {
      const Work work = scheduler.locate(scheduler.tile);
      const int row = work.row + batches.consumer * Tile::kRows;
      if constexpr (grouping_of<Config>() == Grouping::kContraction) {
        batches.num_k_blocks = uniform(work.num_k_blocks);
      }
      batches.scale_row =
          batches.first_row + row_scale_shift(params.lhs_rows, work.lhs_row, work.first_k_block);
      batches.clear();
      if constexpr (Tile::kExchanges) {
        run_whole_or_exchanged(work, row);
        continue;
      }
      // NOTE: the vote tells the compiler that a warp never splits here. Without it the position in
      // the ring would be kept per lane, and every k-block would begin with the 80 cycles that make
      // it uniform again.
      if (__any_sync(0xffffffff, row >= work.row_end)) {
        loop.skip(grouping_of<Config>() == Grouping::kContraction ? batches.num_k_blocks
                                                                  : work.num_k_blocks);
      } else {
        if (grouping_of<Config>() != Grouping::kRows ||
            __any_sync(0xffffffff, work.num_k_blocks > 0)) {
          loop.multiply(Config::kBlockN % 128 == 0 ? 128 : 128 - work.column % 128);
        }
        if constexpr (Config::kIsGated) {
          GatedEpilogue<Config>(loop.batches).store(row, work.row_end, work.column);
        } else if constexpr (Config::kTransposesOut) {
          store_transposed(work, row);
        } else {
          store(row, work.row_end, work.column);
        }
      }
    }
  }

 private:
  // Computes a tile of a group, or stores the zeros of rows of no group, which have no k-blocks. No
  // consumer has stages to skip, because all consumers of a whole tile have rows.
  __device__ __forceinline__ void run_whole_or_exchanged(const Work& work, int row) {
    const int rows = uniform(max(0, work.row_end - work.row));
    const int num_k_blocks = uniform(work.num_k_blocks);
    if (num_k_blocks > 0 && rows <= ExchangedTile<Config>::kMostRows) {
      ExchangedTile<Config>(loop.batches, work).run(rows);
    } else {
      if (num_k_blocks > 0) loop.multiply(128);
      store(row, work.row_end, work.column);
    }
  }

  // Stores by TMA where no row of the consumer belongs to another tile, or where the rows end with
  // the output. NOTE: this code reads the thread index anew. Values that depend on the main loop's
  // own lane stay in registers through that loop, where tall tiles have none left.
  __device__ __forceinline__ void store(int row, int row_end, int column) {
    const Batches<Config>& batches = loop.batches;
    const GemmParams& params = batches.params;
    const int thread = thread_index(), warp = thread / 32 % 4, lane = thread % 32;
    const int end = min(row_end, row + min(Config::kBlockM, Tile::kRows));  // of a short tile
    if constexpr (Config::kNumSlabs > 0) {
      if (grouping_of<Config>() == Grouping::kNone ||
          __all_sync(0xffffffff, row + Tile::kRows <= row_end)) {
        store_tma<Config::kOutF32, Config::kAccumulate, Tile::kMSubs, Config::kBlockN,
                  Config::kNumSlabs>(&params.out_map, batches.shared.slabs[batches.consumer],
                                     batches.promoted, row, column, batches.consumer, warp, lane);
        return;
      }
    }
    store_direct<Config::kOutF32, Config::kAccumulate, Tile::kMSubs, Config::kBlockN>(
        params.out, params.accum, batches.promoted, end, params.n, row, column, warp, lane);
  }

  // Stores by TMA where no column of the tile belongs to another group, or where the columns end
  // with the output.
  __device__ __forceinline__ void store_transposed(const Work& work, int row) {
    const Batches<Config>& batches = loop.batches;
    const GemmParams& params = batches.params;
    const int thread = thread_index(), warp = thread / 32 % 4, lane = thread % 32;
    if constexpr (Config::kNumSlabs > 0) {
      if (grouping_of<Config>() == Grouping::kNone ||
          __all_sync(0xffffffff, work.column + Config::kBlockN <= params.n)) {
        store_tma_transposed<Config::kOutF32, Config::kAccumulate, Tile::kMSubs, Config::kBlockN,
                             Config::kNumSlabs>(
            &params.out_map, batches.shared.slabs[batches.consumer], batches.promoted,
            work.first_out_row + work.column, row, batches.consumer, warp, lane);
        return;
      }
    }
    store_direct_transposed<Config::kOutF32, Config::kAccumulate, Tile::kMSubs, Config::kBlockN>(
        params.out, params.accum, batches.promoted, min(params.m, row + Tile::kRows), params.m,
        params.n, work.first_out_row, row, work.column, warp, lane);
  }
};

}  // namespace jax_fp8gemm
