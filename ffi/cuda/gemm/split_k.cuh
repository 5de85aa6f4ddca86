// FP8 GEMM of few rows, few columns and a long contraction. It computes what gemm.cuh does for 1d2d
// products without groups, with the same bits.
//
// Such a product has fewer tiles than the GPU has multiprocessors. So the CTAs of a cluster divide
// the k-blocks of a tile of kBlockM x 64: CTA r multiplies k-blocks r, r + kClusterK and so on. A
// k-block is not promoted where it is multiplied. Each CTA gets what the tensor cores gave for its
// share of the tile's columns, from all CTAs, and promotes it in the order of the k-blocks.
//
// The columns of rhs are the rows of wgmma, which takes 64 at a time, and the rows of lhs are its
// columns (exchanged_tile.cuh).
//
// Roles, per CTA of 3 x 128 threads:
//   multiplier  warpgroup 0: wgmma, and sends its results to the CTAs of the cluster
//   adder       warpgroup 1: scales, adds and stores; first it quantises lhs, if that is bf16
//               (split_k_quantizer.cuh)
//   producer    warpgroup 2: one lane each of warps 0 and 2 copy every second k-block
//
// Pipelines:
//   full[stage]     arrivals: 1, one more of who quantises lhs, and the copied bytes; awaited by
//                   the multiplier
//   empty[stage]    arrivals: each warp of the multiplier; awaited by the producer
//   arrived[chunk]  arrivals: 1, and the bytes of kChunk k-blocks that the cluster sends here:
//                   results, and scales where lhs is quantised; awaited by the adder
// A slot for every k-block of the contraction holds what was sent, so no CTA waits for room in
// another one. The stages have the rest of the shared memory.
//
// Limits: those of gemm.cuh; and the slots must leave room for 4 stages, see MostSplitK() in
// ffi/gemm/gemm_config.cc.
// Sources: PTX ISA st.async, mapa, barrier.cluster, and those of gemm.cuh.
#pragma once

#include "gemm/split_k_adder.cuh"
#include "gemm/split_k_quantizer.cuh"
#include "gemm/split_k_ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/wgmma.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct SplitK {
  using Adder = SplitKAdder<Config>;
  static constexpr int kRows = Adder::kRows, kColumns = Adder::kColumns, kSplit = Adder::kSplit;
  static constexpr int kVector = Adder::kVector;
  static constexpr int kNumAccums = Config::kNumAccums;
  using Ring = SplitKRing<Config>;
  using Cursor = typename Ring::Cursor;
  // Where lhs is FP8, the adder just waits for the cluster.
  struct NoQuantizer {
    __device__ __forceinline__ NoQuantizer(const GemmParams&, const Ring&, const Adder&, int) {}
    __device__ __forceinline__ void load_first(int) const {}
    __device__ __forceinline__ void run(int, const Cursor&) const { cluster_wait(); }
  };
  using Quantizer =
      typename Conditional<Config::kQuantizesLhs, SplitKQuantizer<Config>, NoQuantizer>::Type;
  static constexpr int kStageBytes = Ring::kStageBytes;

  struct alignas(1024) Barriers {
    Barrier full[Config::kNumStages], empty[Config::kNumStages], arrived[Adder::kMostChunks];
  };
  static_assert(sizeof(Barriers) == 1024, "mirrored by MostSplitK");

  const GemmParams& params;
  Barriers& barriers;
  const int rank;  // in the cluster
  Adder adder;
  const int count;   // k-blocks of this CTA
  const int offset;  // of the stages in shared memory
  const Ring ring;

  __device__ __forceinline__ SplitK(const GemmParams& params, uint8_t* smem)
      : params(params),
        barriers(*reinterpret_cast<Barriers*>(smem)),
        rank(cluster_rank()),
        adder(params, barriers.arrived, smem + sizeof(Barriers), rank),
        count(ceil_div(adder.num_k_blocks - rank, kSplit)),
        offset(sizeof(Barriers) + Adder::smem_bytes(adder.num_k_blocks)),
        ring{barriers.full, barriers.empty, smem + offset,
             min(min(Config::kNumStages, max(count, kNumAccums)),
                 (JAX_FP8GEMM_SMEM_BYTES - offset) / kStageBytes)} {}

  __device__ __forceinline__ void run() {
    // NOTE: its first loads are ahead of all that TMA brings. Behind that, 8x1536x7168 took 9.6 us
    // in place of 8.0.
    Quantizer quantizer(params, ring, adder, count);
    if (threadIdx.x / 128 == 1) quantizer.load_first(blockIdx.x / kSplit * kColumns);
    init_barriers();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int num_columns = ceil_div(params.n, kColumns);
    const int num_tiles = ceil_div(params.m, kRows) * num_columns;
    Cursor cursor;
    if (warp == 10) cursor.advance(ring.num_stages);
    uint32_t parity = 0;  // of `arrived`
#pragma unroll 1
    for (int tile = blockIdx.x / kSplit; tile < num_tiles; tile += gridDim.x / kSplit) {
      int row = 0, column = tile * kColumns;
      if (tile >= num_columns) {
        row = tile / num_columns * kRows;
        column = tile % num_columns * kColumns;
      }
      // All CTAs of the cluster have barriers that wait for this tile.
      cluster_arrive();
      if (warp < 4) {
        multiply(warp, cursor);
      } else if (warp < 8) {
        quantizer.run(column, cursor);
        const int next = tile + gridDim.x / kSplit;
        if (next < num_tiles) quantizer.load_first(next * kColumns);
        adder.add(threadIdx.x - 128, row, column, parity);
      } else {
        if (warp == 8 || warp == 10) {
          if (elect_one()) {
            ring.template load<kSplit>(params, (warp - 8) / 2, row, column, rank, count, cursor);
          }
        }
        __syncwarp();
        cluster_wait();
      }
      parity ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void init_barriers() {
    if (threadIdx.x == 0) {
      if constexpr (!Config::kQuantizesLhs) tma_prefetch_descriptor(&params.lhs);
      tma_prefetch_descriptor(&params.rhs);
      ring.init_full();
    } else if (threadIdx.x == 32) {
      ring.init_empty();
    } else if (threadIdx.x == 128) {
      adder.init_barriers();
    }
    __syncthreads();
  }

  // Multiplies the k-blocks of this CTA, and sends the results. Before the first one it waits for
  // the cluster.
  __device__ __forceinline__ void multiply(int warp, Cursor& cursor) {
    const int lane = threadIdx.x % 32;
    const uint32_t first_stage = wgmma_descriptor(ring.stages);
    // Where the first k-block goes: in the CTA of the warp's columns, or in those of its halves.
    constexpr int kShares = Adder::kShares;
    uint32_t slot[kShares], arrived[kShares];
#pragma unroll
    for (int share = 0; share < kShares; ++share) {
      const int to = Adder::cta_of(warp, share);
      const float* own = adder.slots + rank * Adder::kSlot + Adder::place_of(lane, 0);
      slot[share] = cluster_address(smem_address(own), to);
      arrived[share] = cluster_address(smem_address(barriers.arrived), to);
    }
    float accum[kNumAccums][kRows / 2];
    int sent_stage = cursor.stage, k_block = rank;
    bool waits_for_cluster = true;
    const auto issue = [&](int i) { ring.multiply(accum[i], cursor, first_stage); };
    const auto send = [&](int i) {
      if (lane == 0) mbarrier_arrive(&ring.empty[sent_stage]);
      if (++sent_stage == ring.num_stages) sent_stage = 0;
      wgmma_pin(accum[i]);
      if (waits_for_cluster) cluster_wait();
      waits_for_cluster = false;
      const uint32_t chunk = k_block / Adder::kChunk * sizeof(Barrier);
#pragma unroll
      for (int e = 0; e < kRows / 8; ++e) {
#pragma unroll
        for (int share = 0; share < kShares; ++share) {
          store_async<kVector>(slot[share] + Adder::place_of(0, e) * 4, arrived[share] + chunk,
                               &accum[i][4 * e + kVector * share]);
        }
      }
#pragma unroll
      for (int share = 0; share < kShares; ++share) slot[share] += kSplit * Adder::kSlot * 4;
      k_block += kSplit;
    };
    Ring::for_each(count, issue, send);
    if (waits_for_cluster) cluster_wait();
  }
};

}  // namespace jax_fp8gemm

extern "C" __global__ void __launch_bounds__(384, 1)
    JAX_FP8GEMM_KERNEL(const __grid_constant__ jax_fp8gemm::GemmParams params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  jax_fp8gemm::SplitK<Config>(params, dynamic_smem).run();
}
