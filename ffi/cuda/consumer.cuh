// A consumer warpgroup: multiplies its rows of each tile on the tensor cores, promotes and stores.
#pragma once

#include "epilogue.cuh"
#include "pipeline.cuh"
#include "scales.cuh"
#include "tile.cuh"
#include "wgmma.cuh"

namespace jax_fp8gemm {

template <typename Config, typename Scheduler>
struct Consumer {
  using Tile = jax_fp8gemm::Tile<Config>;
  using SharedStorage = typename Tile::SharedStorage;

  // What the batches of one k-block need from it besides the operands.
  struct KBlock {
    uint32_t stage;
    // Of this thread's rows, 16 warp + lane / 4 and + 8, in each 64; in 1d2d times the scale of
    // each column block.
    float scale[Tile::kNumColumnBlocks][Tile::kMSubs][2];
  };

  const GemmParams& params;
  SharedStorage& shared;
  const int num_k_blocks;
  const int consumer, warp, lane;
  const int first_row;                // in the tile, of this thread
  const uint32_t lhs_tile, rhs_tile;  // descriptors of this consumer's operands in stage 0

  RingCursor<Config::kNumStages> ring;
  int k_block = 0;  // of the tile, the next one to prepare
  KBlock blocks[Tile::kGroup], next;
  uint32_t lhs_stage, rhs_stage;          // descriptors of the k-block being queued
  float rhs_columns[Tile::kSubRegs / 2];  // 1d1d: scales of this thread's columns of one batch
  float accum[Config::kNumAccums][Tile::kSubRegs];
  float promoted[Tile::kMSubs][Config::kBlockN / 2];

  __device__ __forceinline__ Consumer(const GemmParams& params, SharedStorage& shared,
                                      int num_k_blocks, int consumer)
      : params(params),
        shared(shared),
        num_k_blocks(num_k_blocks),
        consumer(consumer),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        first_row(consumer * Tile::kRows + warp * 16 + lane / 4),
        lhs_tile(wgmma_descriptor(shared.lhs) +
                 __shfl_sync(0xffffffff, consumer, 0) * (Tile::kRows * Tile::kScaleBlock / 16)),
        rhs_tile(wgmma_descriptor(shared.rhs)) {}

  __device__ __forceinline__ void run() {
    Scheduler scheduler(params.m, params.n, params.raster);
    if (Tile::kTakeTurns && consumer == 1) pass_turn();  // consumer 0 goes first
    while (scheduler.next_block()) {
      const int row = scheduler.block_m_idx * Config::kBlockM;
      const int column = scheduler.block_n_idx * Config::kBlockN;
      clear();
      k_block = 0;
      if (row + consumer * Tile::kRows >= params.m) {
        skip_tile();
      } else {
        multiply(128 - column % 128);
        store(row + consumer * Tile::kRows, column);
      }
    }
    if (Tile::kTakeTurns && consumer == 0) await_turn();  // the last pass of the other
  }

 private:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mi = 0; mi < Tile::kMSubs; ++mi) {
#pragma unroll
      for (int i = 0; i < Config::kBlockN / 2; ++i) promoted[mi][i] = 0.f;
    }
  }

  // Below the last row of lhs there is nothing to compute, only turns to pass and stages to return.
  __device__ __forceinline__ void skip_tile() {
#pragma unroll 1
    while (k_block < num_k_blocks) {
      prepare(next);
      if constexpr (Tile::kTakeTurns) {
        for (int batch = 0; batch < Tile::kSubs; ++batch) {
          await_turn();
          pass_turn();
        }
      }
      release(next.stage);
    }
  }

  // Adds up all k-blocks of a tile. boundary: first column of the tile's second column block.
  __device__ __forceinline__ void multiply(int boundary) {
    if constexpr (Tile::kPrepareEarly) prepare(next);
#pragma unroll 1
    for (int i = 0; i < num_k_blocks / Tile::kGroup; ++i) run_batches<-Tile::kAhead>(boundary);
#pragma unroll 1
    for (int i = 0; i < num_k_blocks % Tile::kGroup; ++i) {
#pragma unroll
      for (int batch = 0; batch < Tile::kSubs; ++batch) {
        issue(batch);
        wgmma_wait<0>();
        promote(batch, boundary);
      }
    }
  }

  // Promotes batches kBatch .. kBatches-1 of a group, each kAhead batches after it was queued;
  // starts at -kAhead, where there is only queueing to do. NOTE: a group ends with nothing in
  // flight. Carrying wgmma over the back edge of the loop makes ptxas serialise all of them
  // (C7514); the other consumer's batches cover the gap.
  template <int kBatch>
  __device__ __forceinline__ void run_batches(int boundary) {
    if constexpr (kBatch < Tile::kBatches) {
      constexpr bool kQueues = kBatch + Tile::kAhead < Tile::kBatches;
      if constexpr (kQueues) issue(kBatch + Tile::kAhead);
      if constexpr (kBatch >= 0) {
        if constexpr (Tile::kTakeTurns) {
          // With half a batch left, the other consumer has just time to queue its own behind it.
          wgmma_wait<1>();
          pass_turn();
        }
        wgmma_wait<(kQueues ? Tile::kAhead : Tile::kBatches - 1 - kBatch)>();
        promote(kBatch, boundary);
      }
      run_batches<kBatch + 1>(boundary);
    }
  }

  // Waits for the next k-block and reads its scales.
  __device__ __forceinline__ void prepare(KBlock& block) {
    mbarrier_wait(&shared.full[ring.stage], ring.phase);
    block.stage = ring.stage;
#pragma unroll
    for (int mi = 0; mi < Tile::kMSubs; ++mi) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float lhs_scale = shared.lhs_scale[ring.stage][first_row + mi * 64 + half * 8];
#pragma unroll
        for (int i = 0; i < Tile::kNumColumnBlocks; ++i) {
          block.scale[i][mi][half] =
              Config::kIs1d1d ? lhs_scale : __fmul_rn(lhs_scale, shared.rhs_scale[ring.stage][i]);
        }
      }
    }
    ring.advance();
    ++k_block;
  }

  // Queues one batch on the tensor cores.
  __device__ __forceinline__ void issue(int batch) {
    const int sub = batch % Tile::kSubs;
    if (sub == 0) {
      if constexpr (Tile::kPrepareEarly) {
        blocks[0] = next;
      } else {
        prepare(blocks[batch / Tile::kSubs]);
      }
      // The shuffle tells the compiler that the descriptors are uniform; else each wgmma costs
      // four R2UR.
      const uint32_t stage = __shfl_sync(0xffffffff, blocks[batch / Tile::kSubs].stage, 0);
      lhs_stage = lhs_tile + stage * (Tile::kLhsBytes / 16);
      rhs_stage = rhs_tile + stage * (Tile::kRhsBytes / 16);
    }
    const uint32_t lhs = lhs_stage + sub % Tile::kMSubs * 512;
    const uint32_t rhs = rhs_stage + sub / Tile::kMSubs * (Config::kSubN * 8);
    float (&d)[Tile::kSubRegs] = accum[batch % Config::kNumAccums];
    if constexpr (Tile::kTakeTurns) await_turn();
    wgmma_fence();
    Wgmma<Config::kSubN>::template run<true>(d, lhs, rhs);
#pragma unroll
    for (int step = 1; step < 4; ++step) {
      if (Tile::kTakeTurns && step == 2) wgmma_commit();  // the first half, see run_batches
      Wgmma<Config::kSubN>::template run<false>(d, lhs + step * 2, rhs + step * 2);
    }
    wgmma_commit();
    if constexpr (Tile::kReadColumnsEarly) {
      if (sub % Tile::kMSubs == 0) read_columns(blocks[0].stage, sub / Tile::kMSubs);
    }
    if (Tile::kPrepareEarly && sub == Tile::kSubs - 1 && k_block < num_k_blocks) prepare(next);
  }

  // Promotes one finished batch; gives the stage back with the last one of a k-block.
  __device__ __forceinline__ void promote(int batch, int boundary) {
    const int sub = batch % Tile::kSubs, mi = sub % Tile::kMSubs, ni = sub / Tile::kMSubs;
    float (&d)[Tile::kSubRegs] = accum[batch % Config::kNumAccums];
    float* sums = promoted[mi] + ni * Tile::kSubRegs;
    const KBlock& block = blocks[batch / Tile::kSubs];
    wgmma_pin(d);
    if (Config::kIs1d1d && !Tile::kReadColumnsEarly && mi == 0) read_columns(block.stage, ni);
    if (sub == Tile::kSubs - 1) release(block.stage);
    if constexpr (Config::kIs1d1d) {
      promote_1d1d(sums, d, block.scale[0][mi], rhs_columns);
    } else if constexpr (Tile::kSplitSub) {
      promote_1d2d_split(sums, d, block.scale[0][mi], block.scale[1][mi],
                         boundary - ni * Config::kSubN);
    } else {
      const bool is_latter = Tile::kTwoBlocks && ni * Config::kSubN >= boundary;
      promote_1d2d(sums, d, block.scale[is_latter ? Tile::kNumColumnBlocks - 1 : 0][mi]);
    }
  }

  // 1d1d: reads the scales of this thread's columns of the ni-th part of the tile.
  __device__ __forceinline__ void read_columns(uint32_t stage, int ni) {
#pragma unroll
    for (int j = 0; j < Config::kSubN / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(
          &shared.rhs_scale[stage][ni * Config::kSubN + 8 * j + 2 * (lane % 4)]);
      rhs_columns[2 * j] = pair.x;
      rhs_columns[2 * j + 1] = pair.y;
    }
  }

  // Turns on the tensor cores between two consumers: named barriers 4 and 5, on which the one whose
  // turn it becomes waits with 128 threads and the other arrives with 128.
  __device__ __forceinline__ void await_turn() { named_barrier_sync(4 + consumer, 256); }
  __device__ __forceinline__ void pass_turn() { named_barrier_arrive(4 + (consumer ^ 1), 256); }

  // Tells the producer of every CTA that shares the stage that this warp is done with it.
  __device__ __forceinline__ void release(uint32_t stage) {
    Barrier* empty = &shared.empty[stage];
    __syncwarp();  // every lane has read its scales
    if constexpr (Config::kClusterSize == 1) {
      if (lane == 0) mbarrier_arrive(empty);
    } else {
      if (lane < Config::kClusterSize) mbarrier_arrive_remote(empty, lane);
    }
  }

  __device__ __forceinline__ void store(int row, int column) {
    if constexpr (Config::kNumSlabs > 0) {
      store_tma<Config::kOutF32, Config::kAccumulate, Tile::kMSubs, Config::kBlockN,
                Config::kNumSlabs>(&params.out_map, shared.slabs[consumer], promoted, row, column,
                                   consumer, warp, lane);
    } else {
      const int end = min(params.m, row + min(Config::kBlockM, Tile::kRows));  // of a short tile
      store_direct<Config::kOutF32, Config::kAccumulate, Tile::kMSubs, Config::kBlockN>(
          params.out, params.accum, promoted, end, params.n, row, column, warp, lane);
    }
  }
};

}  // namespace jax_fp8gemm
