// The last two warpgroups where lhs is bf16: they quantise its rows, and store values and scales
// into the stages, in the place of the copies of them.
#pragma once

#include "gemm/lhs_rows.cuh"
#include "gemm/pipeline.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/tile.cuh"

namespace jax_fp8gemm {

// Each of the eight warps takes every eighth k-block. NOTE: a load of lhs waits behind all that TMA
// brings for several stages. So values of later k-blocks must be on their way: with two k-blocks
// for each of four warps, 8x4096x14336 took 34.7 us, and 23.2 with three for each of eight.
template <typename Config, typename Scheduler>
struct LhsQuantizer {
  using Tile = jax_fp8gemm::Tile<Config>;
  using Ring = typename Tile::Ring;
  static constexpr int kNumWarps = 4 * Tile::kQuantizerWarpgroups;
  template <int kPasses>
  using Rows = LhsRows<Config::kLhsE5M2, kPasses>;

  const GemmParams& params;
  typename Tile::SharedStorage& shared;
  const int warp, lane;

  __device__ __forceinline__ LhsQuantizer(const GemmParams& params,
                                          typename Tile::SharedStorage& shared)
      : params(params),
        shared(shared),
        warp(thread_index() / 32 - 4 * (Config::kNumConsumers + 1)),
        lane(thread_index() % 32) {}

  __device__ __forceinline__ void run() const {
    params.m <= 4 ? run_in_passes<1, 5>() : run_in_passes<2, 3>();
  }

 private:
  // kAhead: k-blocks whose values are on their way. NOTE: parity tells only two phases of a barrier
  // apart. A warp waits for a stage, and waited before, eight k-blocks ago, for consumers to give
  // back another one. So there must be at least eight stages, and the count goes on from tile to
  // tile. With seven, kernels ended in a launch failure.
  template <int kPasses, int kAhead>
  __device__ __forceinline__ void run_in_passes() const {
    static_assert(Config::kNumStages >= kNumWarps, "the parity of a stage must be known");
    const int num_k_blocks = ceil_div(params.k, Tile::kScaleBlock);
    Scheduler scheduler(params, shared);
    Ring ring;  // at the next k-block of this warp
    ring.skip(warp);
    int next = warp;  // the same in the tile
    const LhsCursor<kPasses> first(params, lane);
    Rows<kPasses> rows[kAhead];
    for (; scheduler.tile < scheduler.count(); scheduler.next()) {
      LhsCursor<kPasses> from = first;
      from.skip(next);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) rows[i].load(from, i * kNumWarps);
#pragma unroll 1
      for (; next < num_k_blocks; next += kNumWarps * kAhead) {
        from.skip(kNumWarps * kAhead);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (next + i * kNumWarps < num_k_blocks) {
            store(rows[i], ring);
            ring.skip(kNumWarps);
          }
          rows[i].load(from, i * kNumWarps);
        }
      }
      next = (next - num_k_blocks) % kNumWarps;
    }
  }

  // Quantises the values of a k-block, and stores them and the scales of the rows in its stage.
  template <int kPasses>
  __device__ __forceinline__ void store(const Rows<kPasses>& rows, const Ring& at) const {
    BlockScale block[kPasses];
    rows.scale(block);
    mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      rows.store(shared.lhs[at.stage], pass, block[pass], lane);
      if (lane % 8 == 0) shared.lhs_scale[at.stage][rows.row(pass, lane)] = block[pass].scale;
    }
    fence_proxy_async_shared();  // wgmma reads what was stored
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.full[at.stage]);
  }
};

}  // namespace jax_fp8gemm
