// FP8 GEMM with fine-grained scales for Hopper (sm_90a): lhs, rhs and out are the A, B and D of the
// literature.
//
//   out[i, j] = sum over k-blocks b of lhs_scale[i, b] * rhs_scale[j', b] * (lhs[i, b] . rhs[j, b])
//
// lhs (m, k) and rhs (n, k) are e4m3 or e5m2, row-major ("K-major"); a k-block is 128 of k.
// 1d2d: j' = j / 128. 1d1d: j' = j. out is bf16 or f32. A gated product is [gate | up], and stores
// its h as FP8 with 1x128 scales (gated_epilogue.cuh).
//
// Roles, per CTA of Tile::kNumThreads, persistent over tiles of kBlockM x kBlockN:
//   consumers  warpgroups 0 .. kNumConsumers-1, each with its own rows: wgmma, promotion, store
//   producer   the next warpgroup; warp 0, one lane: everything that is copied in bulk, or half of
//              it, and warp 2 the other half; warp 1: single scales; warp 3: zeros of unused rows
//              (row_clearer.cuh)
//   quantisers two more warpgroups, where lhs is bf16 (lhs_quantizer.cuh)
//
// Pipelines:
//   full[stage]   arrivals: full_arrivals(), and the copied bytes; awaited by the consumers
//   empty[stage]  arrivals: each consumer warp of each CTA in the cluster; awaited by the producer
//   slabs         each consumer's staging of its output; rewritten once TMA has read it
//   queue         which tile is next, where groups cut the rows: from producer warp 1 to the others
// There is no CTA-wide barrier after the start: one consumer's epilogue runs under another's wgmma.
//
// Timeline of a consumer: a "batch" is 4 wgmma, k = 128, of one 64 x kSubN part of its tile.
// Batches go round kNumAccums accumulators: while one is promoted (scaled and added to the f32 sum
// in registers), the next kNumAccums - 1 are queued on the tensor cores.
//   queue 1 | queue 2, wait 1, promote 1 | queue 3, wait 2, promote 2 | ...
// With one accumulator, other consumers' batches run while one is promoted.
// The tensor cores keep only about 14 bits of a running sum (DeepSeek-V3 report, section 3.3.2),
// hence a promotion every 128 of k.
//
// Short tiles of groups (exchanged_tile.cuh): the columns of rhs become the rows of wgmma, which
// takes 64 at a time, and the few rows of the group become its columns.
//
// Clusters: kClusterM CTAs share an rhs tile, or kClusterN CTAs an lhs tile; each loads a part of
// it and multicasts it to all.
//
// Limits: k % 16 == 0 and n % 8 == 0 (TMA strides); m, n, k >= 1. The loads fill what lies outside
// with zeros, the stores clip it. The translation unit defines Config, JAX_FP8GEMM_KERNEL (a name),
// JAX_FP8GEMM_LHS_TYPE, JAX_FP8GEMM_RHS_TYPE and JAX_FP8GEMM_SMEM_BYTES, see
// ffi/gemm/gemm_config.cc.
// Sources: PTX ISA wgmma.mma_async, cp.async.bulk.tensor, mbarrier, setmaxnreg.
#pragma once

#include "gemm/bulk_loader.cuh"
#include "gemm/consumer.cuh"
#include "gemm/lhs_quantizer.cuh"
#include "gemm/row_clearer.cuh"
#include "gemm/scale_writer.cuh"
#include "gemm/scheduler.cuh"

extern "C" __global__ void __launch_bounds__(jax_fp8gemm::Tile<Config>::kNumThreads, 1)
    JAX_FP8GEMM_KERNEL(const __grid_constant__ jax_fp8gemm::GemmParams params) {
  using namespace jax_fp8gemm;
  using Tile = jax_fp8gemm::Tile<Config>;
  using Scheduler = typename SchedulerOf<Config, grouping_of<Config>()>::Type;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  auto& shared = *reinterpret_cast<typename Tile::SharedStorage*>(dynamic_smem);
  const bool writes_scales = ScaleWriter<Config, Scheduler>::is_needed(params);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);

  // Initialise the barriers, for the whole cluster.
  if (threadIdx.x == 0) {
    if constexpr (!Config::kQuantizesLhs) tma_prefetch_descriptor(&params.lhs);
    tma_prefetch_descriptor(&params.rhs);
    for (int stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(&shared.full[stage], full_arrivals(writes_scales, Config::kQuantizesLhs));
      mbarrier_init(&shared.empty[stage],
                    empty_arrivals(Config::kNumConsumers, Config::kClusterSize));
    }
    init_queue<Config>(shared);
    mbarrier_fence_init();
  }
  if (threadIdx.x / 32 == 1) fill_groups<Config>(params, shared);
  if constexpr (Config::kClusterSize > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  // A launch gives every thread the same number of registers, a multiple of 8; setmaxnreg only
  // moves them, and waits forever for more.
  constexpr int kThreads = Tile::kNumThreads;
  constexpr bool kMovesRegs = Config::kNumConsumers > 1 || Config::kQuantizesLhs;
  static_assert(
      !kMovesRegs || 128 * (Config::kProducerRegs + Config::kNumConsumers * Config::kConsumerRegs +
                            Tile::kQuantizerWarpgroups * Config::kQuantizerRegs) <=
                         65536 / kThreads / 8 * 8 * kThreads,
      "the roles must not ask for more registers than the launch has");

  // Split the roles. One consumer fits the registers of the launch, unless lhs is quantised here;
  // two or three take over the producer's.
  if (Config::kQuantizesLhs && warpgroup > Config::kNumConsumers) {
    if constexpr (Config::kQuantizesLhs) {
      setmaxnreg_dec<Config::kQuantizerRegs>();
      LhsQuantizer<Config, Scheduler>(params, shared).run();
    }
  } else if (warpgroup == Config::kNumConsumers) {
    if constexpr (kMovesRegs) setmaxnreg_dec<Config::kProducerRegs>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
    if (warp == 0 || (Tile::kNumLoaders > 1 && warp == 2)) {
      if (elect_one()) {
        BulkLoader<Config, Scheduler> loader{params, shared, warp / 2};
        has_scale_map(params.lhs_rows) ? loader.template run<true>() : loader.template run<false>();
      }
    } else if (warp == 1 && writes_scales) {
      ScaleWriter<Config, Scheduler>{params, shared}.run();
    } else if (warp == 3) {
      clear_unused_rows<Config>(params, shared);
    }
  } else {
    if constexpr (kMovesRegs) setmaxnreg_inc<Config::kConsumerRegs>();
    Consumer<Config, Scheduler>(params, shared, warpgroup).run();
    if constexpr (Config::kNumSlabs > 0) {
      if (threadIdx.x / 32 % 4 == 0 && elect_one()) tma_store_wait_read<0>();
    }
  }
}
