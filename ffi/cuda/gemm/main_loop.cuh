// The main loop of a consumer warpgroup: the order in which it queues and promotes the batches of a
// tile's k-blocks.
#pragma once

#include "gemm/batches.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct MainLoop {
  using Tile = jax_fp8gemm::Tile<Config>;

  Batches<Config> batches;

  // Adds up all k-blocks of a tile. `boundary` is the first column of the tile's second column
  // block.
  __device__ __forceinline__ void multiply(int boundary) {
    if constexpr (Config::kNumAccums == 1) {
      multiply_by_one(boundary);
    } else {
      bool are_ready = false;  // kReadsScalesLate: the k-blocks of the next loop trip
#pragma unroll 1
      for (int i = 0; i < batches.num_k_blocks / Tile::kGroup; ++i)
        run_batches<-Tile::kAhead>(boundary, are_ready);
#pragma unroll 1
      for (int i = 0; i < batches.num_k_blocks % Tile::kGroup; ++i) {
        batches.prepare(batches.blocks[0]);
#pragma unroll
        for (int batch = 0; batch < Tile::kSubs; ++batch) {
          batches.issue(batch);
          batches.scale_parts(batch);
          wgmma_wait<0>();
          batches.finish(batch, boundary);
        }
      }
    }
  }

  // Below the last row of lhs there is nothing to compute, only stages to return.
  __device__ __forceinline__ void skip(int num_k_blocks) {
#pragma unroll 1
    for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
      batches.wait();
      batches.release(batches.ring.stage);
      batches.ring.advance();
    }
  }

 private:
  // With one accumulator a batch is promoted before the next is queued, and only other consumers'
  // batches keep the tensor cores busy meanwhile: every cycle between a promotion and the next
  // wgmma counts. So the barrier of the next k-block is tested early in the last promotion, and
  // waited for only if it was not yet full.
  __device__ __forceinline__ void multiply_by_one(int boundary) {
    if (grouping_of<Config>() != Grouping::kContraction || batches.num_k_blocks > 0) {
      batches.wait();
    }
    if constexpr (Tile::kExchanges) {
      // NOTE: two branches. Beside the loops of ExchangedTile ptxas keeps the count in a uniform
      // register, and one branch with both conditions waited for it: large groups took 1-2 %
      // longer.
#pragma unroll 1
      for (int k_block = 1;;) {
        const bool is_full = multiply_k_block(boundary);
        if (k_block++ == batches.num_k_blocks) return;
        if (!is_full) batches.wait();
      }
    } else {
      // NOTE: where a k-block is one batch, four k-blocks in a loop trip make tiles of three
      // consumers 2 % faster, or more. Where it is two, they make tiles 1 to 3 % slower.
      constexpr int kTrip = !Config::kIs1d1d && Tile::kSubs == 1 ? 4 : 1;
#pragma unroll kTrip
      for (int k_block = 1; k_block <= batches.num_k_blocks; ++k_block) {
        const bool is_full = multiply_k_block(boundary);
        if (!is_full && k_block < batches.num_k_blocks) batches.wait();
      }
    }
  }

  // Returns whether the next one is there.
  __device__ __forceinline__ bool multiply_k_block(int boundary) {
    bool is_full;
    batches.enter(batches.blocks[0]);
    batches.read_scales(batches.blocks[0]);
#pragma unroll
    for (int batch = 0; batch < Tile::kSubs; ++batch) {
      batches.issue(batch);
      if constexpr (Tile::kReadColumnsEarly) batches.read_columns(batch);
      batches.scale_parts(batch);
      wgmma_wait<0>();
      if constexpr (!Tile::kReadColumnsEarly) batches.read_columns(batch);
      if (batch == Tile::kSubs - 1) {
        batches.release(batches.ring.stage);
        batches.advance();
        is_full = batches.is_ready();
      }
      batches.promote(batch, boundary);
    }
    return is_full;
  }

  // Promotes batches kBatch .. kBatches-1 of a group, each kAhead batches after it was queued;
  // starts at -kAhead, where there is only queueing to do. NOTE: a group ends with nothing in
  // flight. Carrying wgmma over the back edge of the loop makes ptxas serialise all of them
  // (C7514).
  template <int kBatch>
  __device__ __forceinline__ void run_batches(int boundary, bool& are_ready) {
    if constexpr (kBatch < Tile::kBatches) {
      constexpr int kNext = kBatch + Tile::kAhead;
      if constexpr (kNext < Tile::kBatches) {
        if constexpr (kNext % Tile::kSubs == 0)
          prepare(batches.blocks[kNext / Tile::kSubs], are_ready);
        batches.issue(kNext);
        if constexpr (Tile::kReadColumnsEarly) batches.read_columns(kNext);
      }
      if constexpr (Tile::kReadsScalesLate) read_scales_late<kBatch, kNext>(are_ready);
      if constexpr (kBatch >= 0) {
        batches.scale_parts(kBatch);
        wgmma_wait<(kNext < Tile::kBatches ? Tile::kAhead : Tile::kBatches - 1 - kBatch)>();
        batches.finish(kBatch, boundary);
      }
      run_batches<kBatch + 1>(boundary, are_ready);
    }
  }

  __device__ __forceinline__ void prepare(typename Batches<Config>::KBlock& block, bool are_ready) {
    if constexpr (Tile::kReadsScalesLate) {
      if (!are_ready) batches.wait();
      batches.enter(block);
      batches.advance();
    } else {
      batches.prepare(block);
    }
  }

  // Reads scales once batch kNext is queued: before the first promotion those of all k-blocks so
  // far, later those of the k-block that kNext begins. When all batches are queued, it tests the
  // barriers of the next loop trip. The tensor cores are busy meanwhile. NOTE: a wgmma waits for
  // scales that are still being read.
  template <int kBatch, int kNext>
  __device__ __forceinline__ void read_scales_late(bool& are_ready) {
    constexpr int kQueued = kNext < Tile::kBatches ? kNext : Tile::kBatches - 1;
    if constexpr (kBatch == 0) {
#pragma unroll
      for (int i = 0; i <= kQueued / Tile::kSubs; ++i) batches.read_scales(batches.blocks[i]);
    } else if constexpr (kBatch > 0 && kNext < Tile::kBatches && kNext % Tile::kSubs == 0) {
      batches.read_scales(batches.blocks[kNext / Tile::kSubs]);
    }
    if constexpr (kBatch >= 0 && kNext == Tile::kBatches - 1) {
      are_ready = batches.template are_ready<Tile::kGroup>();
    }
  }
};

}  // namespace jax_fp8gemm
