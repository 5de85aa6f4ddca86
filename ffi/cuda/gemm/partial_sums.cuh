// FP8 GEMM of up to 64 rows, few columns and a long contraction. It computes what gemm.cuh does for
// 1d2d products without groups, but in another order, so its bits are others.
//
// Such a product has fewer tiles than the GPU has multiprocessors, and a tile takes its k-blocks
// one after the other. Here the CTAs of a cluster divide the k-blocks of a tile of kBlockM x 64:
// CTA r promotes a part of them into a sum of its own. The sums of the CTAs are added in the order
// of r. split_k.cuh divides k-blocks without a change of bits, but only for up to 16 rows.
//
// The columns of rhs are the rows of wgmma, which takes 64 at a time, and the rows of lhs are its
// columns (exchanged_tile.cuh).
//
// Roles, per CTA of 3 x 128 threads:
//   multiplier  warpgroup 0: wgmma and promotion
//   scales      warpgroup 1: multiplies the scales of rows and columns
//   producer    warpgroup 2: one lane each of warps 0 and 2 copy every second k-block
// Then all threads add: a CTA adds every kParts-th row of the tile, which it reads from all CTAs.
//
// Pipelines:
//   full[stage]   arrivals: 1, and the copied bytes; awaited by the multiplier
//   empty[stage]  arrivals: each warp of the multiplier; awaited by the producer
//
// Limits: those of gemm.cuh; and the scales must leave room for 4 stages, see MostSplitK() in
// ffi/gemm/gemm_config.cc.
// Sources: PTX ISA ld.shared::cluster, mapa, barrier.cluster, and those of gemm.cuh.
#pragma once

#include "gemm/split_k_ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/wgmma.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct PartialSums {
  static constexpr int kRows = Config::kBlockM, kColumns = 64, kParts = Config::kClusterK;
  static constexpr int kNumAccums = Config::kNumAccums;
  using Ring = SplitKRing<Config>;
  using Cursor = typename Ring::Cursor;
  static constexpr int kStageBytes = Ring::kStageBytes;
  // f32 of a row of `sums`. The lanes of a warp write to banks of their own.
  static constexpr int kSumsRow = kColumns + 4;
  static constexpr int kSumsBytes = (kRows * kSumsRow * 4 + 1023) / 1024 * 1024;
  static constexpr int kScalesBarrier = 1;

  struct alignas(1024) Barriers {
    Barrier full[Config::kNumStages], empty[Config::kNumStages];
  };
  static_assert(sizeof(Barriers) == 1024, "mirrored by MostSplitK");

  const GemmParams& params;
  Barriers& barriers;
  const int num_k_blocks, per_part;  // of the contraction, of a CTA at most
  const int rank;                    // in the cluster
  const int first, count;            // k-blocks of this CTA
  float* const sums;                 // [kRows][kSumsRow]: those of this CTA
  float* const scales;               // [per_part][kRows]: of row and columns, multiplied
  const int offset;                  // of the stages in shared memory
  const Ring ring;

  __device__ __forceinline__ PartialSums(const GemmParams& params, uint8_t* smem)
      : params(params),
        barriers(*reinterpret_cast<Barriers*>(smem)),
        num_k_blocks(ceil_div(params.k, 128)),
        per_part(ceil_div(num_k_blocks, kParts)),
        rank(cluster_rank()),
        first(rank * per_part),
        count(max(0, min(per_part, num_k_blocks - first))),
        sums(reinterpret_cast<float*>(smem + sizeof(Barriers))),
        scales(reinterpret_cast<float*>(smem + sizeof(Barriers) + kSumsBytes)),
        offset(sizeof(Barriers) + kSumsBytes + (per_part * kRows * 4 + 1023) / 1024 * 1024),
        ring{barriers.full, barriers.empty, smem + offset,
             min(min(Config::kNumStages, max(per_part, kNumAccums)),
                 (JAX_FP8GEMM_SMEM_BYTES - offset) / kStageBytes)} {}

  __device__ __forceinline__ void run() {
    init_barriers();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int num_columns = ceil_div(params.n, kColumns);
    const int num_tiles = ceil_div(params.m, kRows) * num_columns;
    Cursor cursor;
    if (warp == 10) cursor.advance(ring.num_stages);
#pragma unroll 1
    for (int tile = blockIdx.x / kParts; tile < num_tiles; tile += gridDim.x / kParts) {
      const int row = tile / num_columns * kRows, column = tile % num_columns * kColumns;
      if (warp < 4) {
        multiply(warp, cursor);
      } else if (warp < 8) {
        read_scales(threadIdx.x - 128, row, column);
        named_barrier_sync(kScalesBarrier, 256);
      } else {
        if (warp == 8 || warp == 10) {
          if (elect_one()) {
            ring.template load<1>(params, (warp - 8) / 2, row, column, first, count, cursor);
          }
        }
        __syncwarp();
      }
      cluster_arrive();
      cluster_wait();  // the sums of all CTAs are there
      add_parts(row, column);
      __syncwarp();
      cluster_arrive();
      cluster_wait();  // and were read
    }
  }

 private:
  __device__ __forceinline__ void init_barriers() {
    if (threadIdx.x == 0) {
      tma_prefetch_descriptor(&params.lhs);
      tma_prefetch_descriptor(&params.rhs);
      ring.init_full();
    } else if (threadIdx.x == 32) {
      ring.init_empty();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void read_scales(int thread, int row, int column) const {
    const float* rhs_scale = params.rhs_scale + size_t(column / 128) * num_k_blocks + first;
#pragma unroll 4
    for (int i = thread; i < count * kRows; i += 128) {
      const int k_block = i / kRows, r = min(row + i % kRows, params.m - 1);
      const float* lhs_scale = params.lhs_scale + size_t(first + k_block) * params.m + r;
      scales[i] = __fmul_rn(__ldg(lhs_scale), __ldg(rhs_scale + k_block));
    }
  }

  // Multiplies and promotes the k-blocks of this CTA, and writes `sums`.
  __device__ __forceinline__ void multiply(int warp, Cursor& cursor) const {
    const int lane = threadIdx.x % 32;
    const uint32_t first_stage = wgmma_descriptor(ring.stages);
    // A thread has rows 8e + 2 (lane % 4) and the next, of two columns 8 apart.
    const float* scale = scales + 2 * (lane % 4);
    float accum[kNumAccums][kRows / 2], total[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) total[i] = 0.f;
    int done_stage = cursor.stage;
    bool waits_for_scales = true;
    const auto issue = [&](int i) { ring.multiply(accum[i], cursor, first_stage); };
    const auto promote = [&](int i) {
      if (lane == 0) mbarrier_arrive(&ring.empty[done_stage]);
      if (++done_stage == ring.num_stages) done_stage = 0;
      wgmma_pin(accum[i]);
      if (waits_for_scales) named_barrier_sync(kScalesBarrier, 256);
      waits_for_scales = false;
#pragma unroll
      for (int e = 0; e < kRows / 8; ++e) {
        const float2 of_rows = *reinterpret_cast<const float2*>(scale + 8 * e);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          total[4 * e + j] =
              __fmaf_rn(j % 2 ? of_rows.y : of_rows.x, accum[i][4 * e + j], total[4 * e + j]);
      }
      scale += kRows;
    };
    Ring::for_each(count, issue, promote);
    if (waits_for_scales) named_barrier_sync(kScalesBarrier, 256);
    float* to = sums + 2 * (lane % 4) * kSumsRow + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i)
      to[(i / 4 * 8 + i % 2) * kSumsRow + i / 2 % 2 * 8] = total[i];
  }

  // Adds the sums of all CTAs in every kParts-th row, four columns a thread, and stores them.
  __device__ __forceinline__ void add_parts(int row, int column) const {
    const int num_rows = min(kRows, params.m - row), n_idx = column + threadIdx.x % 16 * 4;
    if (n_idx >= params.n) return;
#pragma unroll 1
    for (int r = rank + threadIdx.x / 16 * kParts; r < num_rows; r += 24 * kParts) {
      const uint32_t own = smem_address(sums + r * kSumsRow + threadIdx.x % 16 * 4);
      float4 part[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) part[p] = load_from_cluster(cluster_address(own, p));
      float4 total = part[0];
#pragma unroll
      for (int p = 1; p < kParts; ++p) {
        total.x = __fadd_rn(total.x, part[p].x);
        total.y = __fadd_rn(total.y, part[p].y);
        total.z = __fadd_rn(total.z, part[p].z);
        total.w = __fadd_rn(total.w, part[p].w);
      }
      const size_t at = size_t(row + r) * params.n + n_idx;  // n is a multiple of 8
      if constexpr (Config::kOutF32) {
        *reinterpret_cast<float4*>(static_cast<float*>(params.out) + at) = total;
      } else {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + at) =
            make_uint2(pack_bf16(total.x, total.y), pack_bf16(total.z, total.w));
      }
    }
  }
};

}  // namespace jax_fp8gemm

extern "C" __global__ void __launch_bounds__(384, 1)
    JAX_FP8GEMM_KERNEL(const __grid_constant__ jax_fp8gemm::GemmParams params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  jax_fp8gemm::PartialSums<Config>(params, dynamic_smem).run();
}
