// FP8 GEMM with fine-grained scales for Hopper (sm_90a): lhs, rhs and out are the A, B and D of the
// literature.
//
//   out[i, j] = sum over k-blocks b of  lhs_scale[i, b] * rhs_scale[j', b] * (lhs[i, b] . rhs[j,
//   b])
//
// lhs (m, k) and rhs (n, k) are e4m3 or e5m2, row-major ("K-major"), k-blocks of 128; lhs_scale is
// read as [k/128][m]. 1d2d: j' = j / 128, rhs_scale [n/128][k/128]. 1d1d: j' = j, rhs_scale
// [k/128][n]. out is bf16 or f32.
//
// Roles, per CTA of (kNumConsumers + 1) x 128 threads, persistent over tiles of kBlockM x kBlockN:
//   consumers   warpgroups 0 .. kNumConsumers-1, each with its own rows of the tile: wgmma,
//   promotion, store producer    the last warpgroup, one elected lane: TMA loads of lhs, rhs and,
//   in 1d1d, the rhs scales
//
// Pipelines:
//   full[stage]    1 arrival (producer, with the byte count) + the TMA bytes; awaited by the
//   consumers empty[stage]   one arrival per consumer warp of each CTA in the cluster; awaited by
//   the producer slabs          each consumer's own staging of its bf16 output; a slab is rewritten
//   once TMA has read it
// There is no CTA-wide barrier after the start, so the consumers drift apart and one's epilogue
// runs under the other's wgmma.
//
// Timeline of a consumer: a "batch" is 4 wgmma, k = 128, of one 64 x kSubN part of its tile.
// Batches go round kNumAccums accumulators: while one is promoted (scaled and added to the f32 sum
// in registers), the next kNumAccums - 1 are already queued on the tensor cores.
//   issue 1 | issue 2, wait 1, promote 1 | issue 3, wait 2, promote 2 | ...
// The tensor core keeps only about 14 bits of a running sum (DeepSeek-V3 report, section 3.3.2),
// hence promotion every 128 of k.
//
// Clusters: kClusterM CTAs share one rhs tile, or kClusterN CTAs one lhs tile; each loads a part
// and multicasts it.
//
// Limits: k % 16 == 0 and n % 8 == 0 (TMA strides); m, n, k >= 1. Edges are zero-filled by the
// loads and clipped by the stores. Sources: PTX ISA wgmma.mma_async, cp.async.bulk.tensor,
// mbarrier, setmaxnreg.
#pragma once

#include "epilogue.cuh"
#include "pipeline.cuh"
#include "scales.cuh"
#include "scheduler.cuh"
#include "wgmma.cuh"

namespace jax_fp8gemm {

// Mirrors GemmParams in gemm.cc.
struct GemmParams {
  TensorMap lhs, rhs, lhs_scale_map, rhs_scale_map,
      out_map;  // rhs_scale_map: 1d1d; out_map: where the store is by TMA
  const float* lhs_scale;
  const float* rhs_scale;
  const float* accum;  // kAccumulate: added to the result
  void* out;
  int m, n, k;
  int raster;  // cluster tiles along m that follow each other, see DenseScheduler
};

template <typename Config, typename Scheduler>
struct Gemm {
  static constexpr int kScaleBlock = 128;
  static constexpr int kRows =
      Config::kBlockM / Config::kNumConsumers < 64 ? 64 : Config::kBlockM / Config::kNumConsumers;
  static constexpr int kMSubs = kRows / 64;
  static constexpr int kSubs =
      kMSubs * (Config::kBlockN / Config::kSubN);  // batches of one k-block
  static constexpr int kSubRegs = Config::kSubN / 2;
  static constexpr int kAhead = Config::kNumAccums - 1;
  // With one accumulator a batch is promoted before the next is queued, so every cycle between them
  // counts: the next k-block is prepared while the last batch of this one runs.
  static constexpr bool kPrepareEarly = Config::kNumAccums == 1;
  // k-blocks of one loop trip: as few as make its batches a multiple of the accumulators.
  static constexpr int kGroup = kSubs % Config::kNumAccums == 0 ? 1 : Config::kNumAccums;
  static constexpr int kBatches = kGroup * kSubs;
  static constexpr int kLhsBytes = Config::kBlockM * kScaleBlock;
  static constexpr int kRhsBytes = Config::kBlockN * kScaleBlock;
  static constexpr int kLhsScaleBytes = Config::kBlockM * 4;
  static constexpr int kRhsScaleBytes = Config::kIs1d1d ? Config::kBlockN * 4 : 0;
  static constexpr int kSlabBytes = 64 * 128;
  // Whether a tile can lie under two 128-column blocks, and whether one wgmma can.
  static constexpr bool kTwoBlocks = !Config::kIs1d1d && 128 % Config::kBlockN != 0;
  static constexpr int kNumColumnBlocks = kTwoBlocks ? 2 : 1;
  static constexpr bool kSplitSub = kTwoBlocks && 128 % Config::kSubN != 0;

  struct alignas(1024) SharedStorage {
    uint8_t lhs[Config::kNumStages][kLhsBytes];
    uint8_t rhs[Config::kNumStages][kRhsBytes];
    uint8_t slabs[Config::kNumConsumers]
                 [Config::kNumSlabs > 0 ? Config::kNumSlabs * kSlabBytes : 16];
    alignas(128) float lhs_scale[Config::kNumStages][Config::kBlockM < 64 ? 64 : Config::kBlockM];
    alignas(128) float rhs_scale[Config::kNumStages]
                                [Config::kIs1d1d ? ceil_div(Config::kBlockN, 32) * 32 : 2];
    alignas(8) Barrier full[Config::kNumStages];
    alignas(8) Barrier empty[Config::kNumStages];
  };

  static_assert(kRows % 64 == 0, "a consumer's rows must be whole wgmma tiles of 64");
  static_assert(Config::kBlockN % Config::kSubN == 0, "kSubN must tile kBlockN");
  static_assert(Config::kBlockM >= 64 || Config::kNumConsumers == 1,
                "short tiles have one consumer");
  static_assert(kBatches % Config::kNumAccums == 0,
                "accumulators must rotate evenly over a loop trip");
  static_assert(Config::kClusterM == 1 || Config::kClusterN == 1, "clusters are one-dimensional");
  static_assert(Config::kBlockN <= 128 ||
                    128 % (Config::kBlockN % 128 ? Config::kBlockN - 128 : 128) == 0,
                "a tile may lie under at most two column blocks");
  // NOTE: with kBlockM < 64 wgmma reads 64 rows all the same: the rows behind belong to the next
  // stage or to rhs, stay inside the allocation, and only reach rows of the result that are never
  // stored.
  static_assert(Config::kBlockM >= 64 || Config::kNumStages * kRhsBytes >= 8192,
                "wgmma would read past the storage");

  using Ring = RingCursor<Config::kNumStages>;
  // What the batches of one k-block need from it besides the operands.
  struct KBlock {
    uint32_t stage;
    // Of this thread's rows, 16 warp + lane / 4 and + 8, in each 64; in 1d2d times the scale of
    // each column block.
    float scale[kNumColumnBlocks][kMSubs][2];
  };

  const GemmParams& params;
  SharedStorage& shared;
  int num_k_blocks;

  // The producer's first warp, one lane: everything that TMA can load.
  __device__ __forceinline__ void produce() {
    Scheduler scheduler(params.m, params.n, params.raster);
    const uint32_t rank = Config::kClusterSize > 1 ? cluster_rank() : 0;
    const bool is_lhs_scale_aligned = is_scale_aligned(params.m);
    Ring ring;
    while (scheduler.next_block()) {
      const int row = scheduler.block_m_idx * Config::kBlockM;
      const int column = scheduler.block_n_idx * Config::kBlockN;
#pragma unroll 1
      for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
        Barrier* full = &shared.full[ring.stage];
        mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
        mbarrier_arrive_expect_tx(full, kLhsBytes + kRhsBytes + kRhsScaleBytes +
                                            (is_lhs_scale_aligned ? kLhsScaleBytes : 0));
        load_operand<Config::kClusterN, kLhsBytes>(&params.lhs, full, shared.lhs[ring.stage],
                                                   k_block, row, rank);
        load_operand<Config::kClusterM, kRhsBytes>(&params.rhs, full, shared.rhs[ring.stage],
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
  __device__ __forceinline__ void produce_scales() {
    const int lane = threadIdx.x % 32;
    const bool is_lhs_scale_aligned = is_scale_aligned(params.m);
    Scheduler scheduler(params.m, params.n, params.raster);
    BlockScales<kNumColumnBlocks> block_scales;
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
        if (!is_lhs_scale_aligned) {
          copy_row_scales<Config::kBlockM>(shared.lhs_scale[ring.stage], lhs_scale, row, params.m,
                                           lane);
          cp_async_arrive(&shared.full[ring.stage]);
          lhs_scale += params.m;
        }
        if (!Config::kIs1d1d && lane == k_block % 32) {
#pragma unroll
          for (int i = 0; i < kNumColumnBlocks; ++i)
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
  __device__ __forceinline__ void prefetch_chunk(BlockScales<kNumColumnBlocks>& scales,
                                                 int block_n_idx, int k_block) {
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
      tma_load_2d(map, full, tile, k_block * kScaleBlock, row);
    } else {
      const int part = rank * (kBytes / kShare);
      tma_load_2d_multicast(map, full, tile + part, k_block * kScaleBlock, row + part / kScaleBlock,
                            (1 << kShare) - 1);
    }
  }

  __device__ __forceinline__ void consume(int consumer) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int first_row = consumer * kRows + warp * 16 + lane / 4;
    const uint32_t lhs_tile = wgmma_descriptor(shared.lhs) +
                              __shfl_sync(0xffffffff, consumer, 0) * (kRows * kScaleBlock / 16);
    const uint32_t rhs_tile = wgmma_descriptor(shared.rhs);
    Scheduler scheduler(params.m, params.n, params.raster);
    Ring ring;
    int k_block = 0;  // the next one to prepare
    float accum[Config::kNumAccums][kSubRegs];
    float rhs_columns[kSubRegs / 2];  // 1d1d: scales of this thread's columns of one batch
    KBlock blocks[kGroup], next;
    uint32_t lhs_stage, rhs_stage;  // descriptors of the k-block being queued

    // Wait for the next k-block and read its scales.
    auto prepare = [&](KBlock& block) {
      mbarrier_wait(&shared.full[ring.stage], ring.phase);
      block.stage = ring.stage;
#pragma unroll
      for (int mi = 0; mi < kMSubs; ++mi) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float lhs_scale = shared.lhs_scale[ring.stage][first_row + mi * 64 + half * 8];
#pragma unroll
          for (int i = 0; i < kNumColumnBlocks; ++i) {
            block.scale[i][mi][half] =
                Config::kIs1d1d ? lhs_scale : __fmul_rn(lhs_scale, shared.rhs_scale[ring.stage][i]);
          }
        }
      }
      ring.advance();
      ++k_block;
    };

    // Queue one batch on the tensor cores.
    auto issue = [&](int batch) {
      const int sub = batch % kSubs;
      if (sub == 0) {
        if constexpr (kPrepareEarly) {
          blocks[0] = next;
        } else {
          prepare(blocks[batch / kSubs]);
        }
        // The shuffle tells the compiler that the descriptors are uniform; else each wgmma costs
        // four R2UR.
        const uint32_t stage = __shfl_sync(0xffffffff, blocks[batch / kSubs].stage, 0);
        lhs_stage = lhs_tile + stage * (kLhsBytes / 16);
        rhs_stage = rhs_tile + stage * (kRhsBytes / 16);
      }
      const uint32_t lhs = lhs_stage + sub % kMSubs * 512;
      const uint32_t rhs = rhs_stage + sub / kMSubs * (Config::kSubN * 8);
      float (&d)[kSubRegs] = accum[batch % Config::kNumAccums];
      wgmma_fence();
      Wgmma<Config::kSubN>::template run<true>(d, lhs, rhs);
#pragma unroll
      for (int step = 1; step < 4; ++step)
        Wgmma<Config::kSubN>::template run<false>(d, lhs + step * 2, rhs + step * 2);
      wgmma_commit();
      if (kPrepareEarly && sub == kSubs - 1 && k_block < num_k_blocks) prepare(next);
    };

    while (scheduler.next_block()) {
      const int row = scheduler.block_m_idx * Config::kBlockM;
      const int column = scheduler.block_n_idx * Config::kBlockN;
      const int boundary = 128 - column % 128;  // first column of the tile's second column block
      float promoted[kMSubs][Config::kBlockN / 2];
#pragma unroll
      for (int mi = 0; mi < kMSubs; ++mi) {
#pragma unroll
        for (int i = 0; i < Config::kBlockN / 2; ++i) promoted[mi][i] = 0.f;
      }

      // Promote one finished batch; give the stage back with the last one of a k-block.
      auto promote = [&](int batch) {
        const int sub = batch % kSubs, mi = sub % kMSubs, ni = sub / kMSubs;
        float (&d)[kSubRegs] = accum[batch % Config::kNumAccums];
        float* sums = promoted[mi] + ni * kSubRegs;
        const KBlock& block = blocks[batch / kSubs];
        wgmma_pin(d);
        if constexpr (Config::kIs1d1d) {
          if (mi == 0) {
#pragma unroll
            for (int j = 0; j < Config::kSubN / 8; ++j) {
              const float2 pair = *reinterpret_cast<const float2*>(
                  &shared.rhs_scale[block.stage][ni * Config::kSubN + 8 * j + 2 * (lane % 4)]);
              rhs_columns[2 * j] = pair.x;
              rhs_columns[2 * j + 1] = pair.y;
            }
          }
        }
        if (sub == kSubs - 1) {
          release(block.stage, lane);
        }
        if constexpr (Config::kIs1d1d) {
          promote_1d1d(sums, d, block.scale[0][mi], rhs_columns);
        } else if constexpr (kSplitSub) {
          promote_1d2d_split(sums, d, block.scale[0][mi], block.scale[1][mi],
                             boundary - ni * Config::kSubN);
        } else {
          const bool is_latter = kTwoBlocks && ni * Config::kSubN >= boundary;
          promote_1d2d(sums, d, block.scale[is_latter ? kNumColumnBlocks - 1 : 0][mi]);
        }
      };

      k_block = 0;
      // Below the last row there is nothing to compute, only stages to give back.
      if (row + consumer * kRows >= params.m) {
#pragma unroll 1
        while (k_block < num_k_blocks) {
          prepare(next);
          release(next.stage, lane);
        }
        continue;
      }
      if constexpr (kPrepareEarly) prepare(next);
#pragma unroll 1
      for (int i = 0; i < num_k_blocks / kGroup; ++i) run_batches<-kAhead>(issue, promote);
#pragma unroll 1
      for (int i = 0; i < num_k_blocks % kGroup; ++i) {
#pragma unroll
        for (int batch = 0; batch < kSubs; ++batch) {
          issue(batch);
          wgmma_wait<0>();
          promote(batch);
        }
      }
      store(promoted, row + consumer * kRows, column, consumer, warp, lane);
    }
  }

  // Promotes batches kBatch .. kBatches-1 of a group, each kAhead batches after it was queued;
  // starts at -kAhead, where there is only queueing to do. NOTE: a group ends with nothing in
  // flight. Carrying wgmma over the back edge of the loop makes ptxas serialise all of them
  // (C7514); the other consumer's batches cover the gap.
  template <int kBatch, typename Issue, typename Promote>
  __device__ __forceinline__ static void run_batches(Issue& issue, Promote& promote) {
    if constexpr (kBatch < kBatches) {
      if constexpr (kBatch + kAhead < kBatches) issue(kBatch + kAhead);
      if constexpr (kBatch >= 0) {
        wgmma_wait<(kBatch + kAhead < kBatches ? kAhead : kBatches - 1 - kBatch)>();
        promote(kBatch);
      }
      run_batches<kBatch + 1>(issue, promote);
    }
  }

  // Tells the producer of every CTA that shares the stage that this warp is done with it.
  __device__ __forceinline__ void release(uint32_t stage, int lane) {
    Barrier* empty = &shared.empty[stage];
    __syncwarp();  // every lane has read its scales
    if constexpr (Config::kClusterSize == 1) {
      if (lane == 0) mbarrier_arrive(empty);
    } else {
      if (lane < Config::kClusterSize) mbarrier_arrive_remote(empty, lane);
    }
  }

  template <int kRegs>
  __device__ __forceinline__ void store(const float (&promoted)[kMSubs][kRegs], int row, int column,
                                        int consumer, int warp, int lane) {
    if constexpr (Config::kNumSlabs > 0) {
      store_tma<Config::kOutF32, Config::kAccumulate, kMSubs, Config::kBlockN, Config::kNumSlabs>(
          &params.out_map, shared.slabs[consumer], promoted, row, column, consumer, warp, lane);
    } else {
      const int end = min(params.m, row + min(Config::kBlockM, kRows));  // rows of a short tile
      store_direct<Config::kOutF32, Config::kAccumulate, kMSubs, Config::kBlockN>(
          params.out, params.accum, promoted, end, params.n, row, column, warp, lane);
    }
  }
};

}  // namespace jax_fp8gemm

extern "C" __global__ void __launch_bounds__((Config::kNumConsumers + 1) * 128, 1)
    JAX_FP8GEMM_KERNEL(const __grid_constant__ jax_fp8gemm::GemmParams params) {
  using namespace jax_fp8gemm;
  using Kernel = Gemm<Config, DenseScheduler<Config>>;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedStorage*>(dynamic_smem);
  Kernel kernel{params, shared, ceil_div(params.k, Kernel::kScaleBlock)};
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

  // Initialise the barriers, for the whole cluster.
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(&params.lhs);
    tma_prefetch_descriptor(&params.rhs);
    for (int stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(&shared.full[stage],
                    full_arrivals(Config::kIs1d1d, is_scale_aligned(params.m)));
      mbarrier_init(&shared.empty[stage],
                    empty_arrivals(Config::kNumConsumers, Config::kClusterSize));
    }
    mbarrier_fence_init();
  }
  if constexpr (Config::kClusterSize > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  // Split the roles. One consumer fits the registers of the launch; two or three take over the
  // producer's.
  if (warpgroup == Config::kNumConsumers) {
    if constexpr (Config::kNumConsumers > 1) setmaxnreg_dec<Config::kProducerRegs>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
    if (warp == 0) {
      if (elect_one()) kernel.produce();
    } else if (warp == 1 && (!Config::kIs1d1d || !is_scale_aligned(params.m))) {
      kernel.produce_scales();
    }
  } else {
    if constexpr (Config::kNumConsumers > 1) setmaxnreg_inc<Config::kConsumerRegs>();
    kernel.consume(warpgroup);
    if constexpr (Config::kNumSlabs > 0) {
      if (threadIdx.x / 32 % 4 == 0 && elect_one()) tma_store_wait_read<0>();
    }
  }

  // No CTA may leave while another can still write to it or arrive on its barriers.
  if constexpr (Config::kClusterSize > 1) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}
