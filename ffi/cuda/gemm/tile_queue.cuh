// Tiles handed out one by one, where they differ in cost: rows of short groups, last tiles of a
// group. Dealt out in turns instead, they left the multiprocessors 4-15 % apart.
#pragma once

#include "gemm/pipeline.cuh"
#include "ptx/mbarrier.cuh"

namespace jax_fp8gemm {

// From the warp that takes tiles from the counter in global memory to the other roles of its CTA.
// Which CTA gets a tile does not change its bits.
struct TileQueue {
  static constexpr int kNumSlots = 2;
  Barrier full[kNumSlots];   // one arrival: of the warp that hands out
  Barrier empty[kNumSlots];  // one of every consumer warp, and of the lane that copies in bulk
  int tile[kNumSlots];

  __device__ __forceinline__ void init(int num_consumers) {
    for (int slot = 0; slot < kNumSlots; ++slot) {
      mbarrier_init(&full[slot], 1);
      mbarrier_init(&empty[slot], 4 * num_consumers + 1);
    }
  }
};

// One role's position in the queue.
struct TileQueueCursor {
  TileQueue& queue;
  RingCursor<TileQueue::kNumSlots> slot;

  // Takes the next tile for this CTA, whose first was blockIdx.x, by a warp; its first lane gets
  // it.
  __device__ __forceinline__ static int take(int* counter) {
    return threadIdx.x % 32 == 0 ? int(gridDim.x) + atomicAdd(counter, 1) : 0;
  }

  // Hands out what the first lane took, by a warp.
  __device__ __forceinline__ int hand_out(int taken) {
    const int lane = threadIdx.x % 32;
    const int tile = __shfl_sync(0xffffffff, taken, 0);
    mbarrier_wait(&queue.empty[slot.stage], slot.phase ^ 1);
    if (lane == 0) {
      queue.tile[slot.stage] = tile;
      mbarrier_arrive(&queue.full[slot.stage]);
    }
    slot.advance();
    return tile;
  }

  // What was handed out next, for a warp.
  __device__ __forceinline__ int receive(int lane) {
    const int tile = read();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&queue.empty[slot.stage]);
    slot.advance();
    return tile;
  }

  // The same for a single lane.
  __device__ __forceinline__ int receive() {
    const int tile = read();
    mbarrier_arrive(&queue.empty[slot.stage]);
    slot.advance();
    return tile;
  }

 private:
  __device__ __forceinline__ int read() const {
    mbarrier_wait(&queue.full[slot.stage], slot.phase);
    return queue.tile[slot.stage];
  }
};

}  // namespace jax_fp8gemm
