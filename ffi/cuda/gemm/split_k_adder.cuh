// What the CTAs of a cluster send each other in split_k.cuh, and the warpgroup that promotes it.
//
// A k-block of 8 rows leaves 4 f32 in a lane of wgmma: two rows of column lane / 4, of 16 for each
// warp, and of the column 8 further on. A CTA gets those of a warp, or of one of its halves.
// So a slot holds kVector f32 of one lane after the other, and that for every 8 rows.
#pragma once

#include "gemm/tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct SplitKAdder {
  static constexpr int kRows = Config::kBlockM, kColumns = 64;
  static constexpr int kSplit = Config::kClusterK;
  static constexpr int kVector = kSplit == 4 ? 4 : 2;
  static constexpr int kSlot = kRows * kColumns / kSplit;  // f32 of a k-block that a CTA adds
  static constexpr int kNumSums = kRows / 8;               // of a thread, 8 rows apart
  static constexpr int kAdders = kSlot / kNumSums;         // threads that have sums
  static constexpr int kChunk = 16, kMostChunks = 32;      // k-blocks of one barrier
  // Scales of a k-block that come from the CTA which quantised its rows (split_k_quantizer.cuh).
  static constexpr int kSentScales = Config::kQuantizesLhs ? kRows : 0;
  static constexpr int kAddersBarrier = 1;
  static_assert(kSplit == 4 || kSplit == 8, "a share must be whole columns of one warp");
  static_assert(kRows == 8 || kRows == 16, "every 8 rows are one sum of a thread");

  const GemmParams& params;
  Barrier* const arrived;  // [kMostChunks]
  const int rank;          // in the cluster
  const int num_k_blocks, num_chunks;
  float* const slots;   // [num_k_blocks][kSlot]
  float* const scales;  // [num_k_blocks][kRows]: of row and columns, multiplied

  __device__ __forceinline__ SplitKAdder(const GemmParams& params, Barrier* arrived, uint8_t* smem,
                                         int rank)
      : params(params),
        arrived(arrived),
        rank(rank),
        num_k_blocks(ceil_div(params.k, 128)),
        num_chunks(ceil_div(num_k_blocks, kChunk)),
        slots(reinterpret_cast<float*>(smem)),
        scales(slots + num_k_blocks * kSlot) {}

  // Of slots and scales, in whole KiB.
  __device__ __forceinline__ static constexpr int smem_bytes(int num_k_blocks) {
    return (num_k_blocks * (kSlot + kRows) * 4 + 1023) / 1024 * 1024;
  }

  // Where lane `lane` stores accumulators 4e + kVector * share and the next of a k-block: in a slot
  // of CTA cta_of(warp, share), from this f32 on.
  static constexpr int kShares = 4 / kVector;
  __device__ __forceinline__ static constexpr int cta_of(int warp, int share) {
    return warp * kShares + share;
  }
  __device__ __forceinline__ static constexpr int place_of(int lane, int e) {
    return lane * kVector + e * 32 * kVector;
  }

  // Which row of every 8, and which column of the CTA's, a thread of the adder has.
  __device__ __forceinline__ static constexpr int row_of(int thread) {
    return 2 * (thread / kVector % 4) + thread % 2;
  }
  __device__ __forceinline__ static constexpr int column_of(int thread) {
    return thread / kVector / 4 % 8 + thread / 2 % (kVector / 2) * 8;
  }

  // By one thread.
  __device__ __forceinline__ void init_barriers() const {
    for (int chunk = 0; chunk < num_chunks; ++chunk) mbarrier_init(&arrived[chunk], 1);
    mbarrier_fence_init();
    expect_results();
  }

  // Promotes what arrives, in the order of the k-blocks, and stores the result.
  __device__ __forceinline__ void add(int thread, int row, int column, uint32_t parity) const {
    if constexpr (!Config::kQuantizesLhs) {
      read_scales(thread, row, column);
      named_barrier_sync(kAddersBarrier, 128);
    }
    if (thread < kAdders) {
      float sums[kNumSums];
#pragma unroll
      for (int i = 0; i < kNumSums; ++i) sums[i] = 0.f;
      // Sum i of a thread is in row 8i + row_of(thread) of the tile.
      const float* slot = slots + thread;
      const float* scale = scales + row_of(thread);
#pragma unroll 1
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        mbarrier_wait(&arrived[chunk], parity);
        const int num = min(kChunk, num_k_blocks - chunk * kChunk);
        num == kChunk ? add_chunk<kChunk>(sums, slot, scale, kChunk)
                      : add_chunk<4>(sums, slot, scale, num);
        slot += kChunk * kSlot;
        scale += kChunk * kRows;
      }
      store(sums, thread, row, column);
    }
    named_barrier_sync(kAddersBarrier, 128);  // the scales were read
    if (thread == 0) expect_results();
  }

 private:
  // Announces, by one thread, what the cluster sends here for a tile.
  __device__ __forceinline__ void expect_results() const {
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      const int num = min(kChunk, num_k_blocks - chunk * kChunk);
      mbarrier_arrive_expect_tx(&arrived[chunk], num * (kSlot + kSentScales) * 4);
    }
  }

  template <int kUnroll>
  __device__ __forceinline__ static void add_chunk(float (&sums)[kNumSums], const float* slot,
                                                   const float* scale, int num) {
#pragma unroll kUnroll
    for (int k_block = 0; k_block < num; ++k_block) {
#pragma unroll
      for (int i = 0; i < kNumSums; ++i)
        sums[i] =
            __fmaf_rn(scale[k_block * kRows + 8 * i], slot[k_block * kSlot + i * kAdders], sums[i]);
    }
  }

  __device__ __forceinline__ void read_scales(int thread, int row, int column) const {
    const float* rhs_scale = params.rhs_scale + size_t(column / 128) * num_k_blocks;
#pragma unroll 8
    for (int i = thread; i < num_k_blocks * kRows; i += 128) {
      const int k_block = i / kRows, r = row + i % kRows;
      // Rows that lhs does not have are not stored.
      const float* lhs_scale = params.lhs_scale + size_t(k_block) * params.m + min(r, params.m - 1);
      scales[i] = __fmul_rn(__ldg(lhs_scale), __ldg(rhs_scale + k_block));
    }
  }

  __device__ __forceinline__ void store(const float (&sums)[kNumSums], int thread, int row,
                                        int column) const {
    const int n_idx = column + rank * (kColumns / kSplit) + column_of(thread);
#pragma unroll
    for (int i = 0; i < kNumSums; ++i) {
      const int m_idx = row + 8 * i + row_of(thread);
      if (m_idx < params.m && n_idx < params.n) {
        const size_t at = size_t(m_idx) * params.n + n_idx;
        if constexpr (Config::kOutF32) {
          static_cast<float*>(params.out)[at] = sums[i];
        } else {
          static_cast<uint16_t*>(params.out)[at] = uint16_t(pack_bf16(sums[i], 0.f));
        }
      }
    }
  }
};

}  // namespace jax_fp8gemm
