// The adder of split_k.cuh where lhs is bf16, before it adds: it quantises the rows of the k-blocks
// that this CTA multiplies, and sends their scales to all CTAs of the cluster.
#pragma once

#include "gemm/lhs_rows.cuh"
#include "gemm/split_k_adder.cuh"
#include "gemm/split_k_ring.cuh"
#include "ptx/cluster.cuh"

namespace jax_fp8gemm {

// Each of the four warps takes every fourth k-block of the CTA.
template <typename Config>
struct SplitKQuantizer {
  using Adder = SplitKAdder<Config>;
  using Ring = SplitKRing<Config>;
  using Cursor = typename Ring::Cursor;
  static constexpr int kRows = Config::kBlockM, kSplit = Config::kClusterK;
  static constexpr int kNumWarps = 4, kPasses = 2;
  static constexpr int kAhead = 4;  // k-blocks of a warp whose values are on their way
  static_assert(kRows == 4 * kPasses, "a warp has four rows in a pass");
  using Rows = LhsRows<Config::kLhsE5M2, kPasses>;

  const GemmParams& params;
  const Ring& ring;
  const Adder& adder;
  const int count;  // k-blocks of this CTA
  const int warp, lane;
  LhsCursor<kPasses> from;
  Rows rows[kAhead];
  float column_scale[kAhead];

  __device__ __forceinline__ SplitKQuantizer(const GemmParams& params, const Ring& ring,
                                             const Adder& adder, int count)
      : params(params),
        ring(ring),
        adder(adder),
        count(count),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        from(params, lane) {}

  // Loads what comes first in a tile.
  __device__ __forceinline__ void load_first(int column) {
    from = LhsCursor<kPasses>(params, lane);
    from.skip(adder.rank + warp * kSplit);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, warp + i * kNumWarps, column);
  }

  // Quantises the k-blocks of a tile. load_first() has loaded the first of them. cursor: at the
  // first of them, and then behind the last one. The cluster has arrived at a barrier, and this
  // waits for it before it stores anything. NOTE: parity tells only two phases of a barrier apart.
  // All stages of earlier tiles were given back then, and a warp waits for every fourth of at least
  // four stages.
  __device__ __forceinline__ void run(int column, Cursor& cursor) {
    Cursor at = cursor;
    at.skip(warp, ring.num_stages);
    cursor.skip(count, ring.num_stages);
    cluster_wait();
#pragma unroll 1
    for (int first = warp; first < count; first += kNumWarps * kAhead) {
      from.skip(kNumWarps * kAhead * kSplit);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int next = first + i * kNumWarps;
        if (next < count) {
          store(rows[i], column_scale[i], adder.rank + next * kSplit, at);
          at.skip(kNumWarps, ring.num_stages);
        }
        load(i, next + kNumWarps * kAhead, column);
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int i, int next, int column) {
    rows[i].load(from, i * kNumWarps * kSplit);
    if (next >= count) return;
    column_scale[i] = __ldg(params.rhs_scale + size_t(column / 128) * adder.num_k_blocks +
                            adder.rank + next * kSplit);
  }

  __device__ __forceinline__ void store(const Rows& rows, float column_scale, int k_block,
                                        const Cursor& at) const {
    BlockScale block[kPasses];
    rows.scale(block);
    mbarrier_wait(&ring.empty[at.stage], at.phase ^ 1);
    uint8_t* tile = ring.stages + at.stage * Ring::kStageBytes + Ring::kColumns * 128;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) rows.store(tile, pass, block[pass], lane);
    fence_proxy_async_shared();  // wgmma reads what was stored
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring.full[at.stage]);
    // The eight lanes of a row send its scale to one CTA each.
    if (const int to = lane % 8; to < kSplit) {
      const uint32_t arrived =
          cluster_address(smem_address(&adder.arrived[k_block / Adder::kChunk]), to);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const float scale = __fmul_rn(block[pass].scale, column_scale);
        const float* own = adder.scales + k_block * kRows + rows.row(pass, lane);
        store_async<1>(cluster_address(smem_address(own), to), arrived, &scale);
      }
    }
  }
};

}  // namespace jax_fp8gemm
