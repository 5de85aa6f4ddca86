// The ring of operands of the kernels in which a cluster divides k, split_k.cuh and
// partial_sums.cuh: positions in it, its barriers, its producer, and the order of its products.
#pragma once

#include "gemm/tile.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct SplitKRing {
  static constexpr int kRows = Config::kBlockM, kColumns = 64;
  static constexpr int kStageBytes = (kRows + kColumns) * 128;
  static constexpr int kNumAccums = Config::kNumAccums;

  // A position in the ring, whose length is known when the kernel runs.
  struct Cursor {
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(int num_stages) {
      if (++stage == num_stages) {
        stage = 0;
        phase ^= 1;
      }
    }
    __device__ __forceinline__ void skip(int num, int num_stages) {
      stage += num;
      while (stage >= num_stages) {
        stage -= num_stages;
        phase ^= 1;
      }
    }
  };

  Barrier *const full, *const empty;  // [num_stages]
  uint8_t* const stages;              // [num_stages][kColumns + kRows][128]: rhs, then lhs
  const int num_stages;  // no more than it needs: a barrier takes 0.02 us to initialise

  // Each by one thread.
  __device__ __forceinline__ void init_full() const {
    constexpr int kArrivals = Config::kQuantizesLhs ? 2 : 1;  // the producer, and who quantises
    for (int stage = 0; stage < num_stages; ++stage) mbarrier_init(&full[stage], kArrivals);
    mbarrier_fence_init();
  }
  __device__ __forceinline__ void init_empty() const {
    for (int stage = 0; stage < num_stages; ++stage) mbarrier_init(&empty[stage], 4);
    mbarrier_fence_init();
  }

  // Copies, by one lane, every second one of `count` k-blocks: first, first + kStep and so on.
  template <int kStep>
  __device__ __forceinline__ void load(const GemmParams& params, int loader, int row, int column,
                                       int first, int count, Cursor& cursor) const {
    // A row that TMA fills with zeros takes longer than one that it loads (Tile::kLoadsShort). What
    // the stage has behind these rows reaches only rows of the result that are not stored.
    const bool is_short = row + kRows > params.m;
    const TensorMap* lhs = is_short ? &params.lhs_part : &params.lhs;
    const int num_rows = Config::kQuantizesLhs ? 0 : is_short ? params.m - row : kRows;
    Cursor next_tile = cursor;
    next_tile.skip(count, num_stages);
#pragma unroll 1
    for (int i = loader; i < count; i += 2) {
      const int k = (first + i * kStep) * 128;
      uint8_t* stage = stages + cursor.stage * kStageBytes;
      mbarrier_wait(&empty[cursor.stage], cursor.phase ^ 1);
      mbarrier_arrive_expect_tx(&full[cursor.stage], (kColumns + num_rows) * 128);
      tma_load_2d(&params.rhs, &full[cursor.stage], stage, k, column);
      if constexpr (!Config::kQuantizesLhs) {
        tma_load_2d(lhs, &full[cursor.stage], stage + kColumns * 128, k, row);
      }
      cursor.advance(num_stages);
      cursor.advance(num_stages);
    }
    cursor = next_tile;
  }

  // Queues the product of the k-block at `cursor`. first_stage: the wgmma descriptor of `stages`.
  __device__ __forceinline__ void multiply(float (&accum)[kRows / 2], Cursor& cursor,
                                           uint32_t first_stage) const {
    mbarrier_wait(&full[cursor.stage], cursor.phase);
    const uint32_t rhs = first_stage + cursor.stage * (kStageBytes / 16);
    multiply_k_block<kRows, true>(accum, rhs, rhs + kColumns * 128 / 16);
    cursor.advance(num_stages);
  }

  // For each of `count` k-blocks in order, issue(i) queues its product in accumulator i, and
  // use(i) takes it when it is finished. Up to kNumAccums are in flight.
  template <typename Issue, typename Use>
  __device__ __forceinline__ static void for_each(int count, const Issue& issue, const Use& use) {
    int left = count;
#pragma unroll 1
    for (; left >= kNumAccums; left -= kNumAccums) {
#pragma unroll
      for (int i = 0; i < kNumAccums; ++i) issue(i);
      use_all<0>(use);
    }
#pragma unroll 1
    for (; left > 0; --left) {
      issue(0);
      wgmma_wait<0>();
      use(0);
    }
  }

 private:
  // Takes accumulators i and up, each when it is finished.
  template <int i, typename Use>
  __device__ __forceinline__ static void use_all(const Use& use) {
    if constexpr (i < kNumAccums) {
      wgmma_wait<kNumAccums - 1 - i>();
      use(i);
      use_all<i + 1>(use);
    }
  }
};

}  // namespace jax_fp8gemm
