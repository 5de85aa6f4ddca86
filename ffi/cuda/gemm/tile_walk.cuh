// In which order a CTA takes its tiles: dealt out in turns, or handed out one by one.
//
// A scheduler (scheduler.cuh) is one of these walks. Its member `tile` is the next tile of the CTA
// as long as it is below count(). Each role has a scheduler of its own and walks the tiles so:
//   a warp             for (; scheduler.has_tile(scheduler.count()); scheduler.next(lane))
//   a lane             for (; scheduler.tile < scheduler.count(); scheduler.next())
//   producer warp 1    fetches the next tile for all roles. In every tile it calls
//                      taken = scheduler.take(); when kHandOutAhead k-blocks are left it calls
//                      next = scheduler.hand_out(taken), and at the end it sets
//                      scheduler.tile = next.
#pragma once

#include "gemm/tile_queue.cuh"
#include "groups.cuh"
#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

// Tiles dealt out in turns.
template <typename Config>
struct StaticWalk {
  static constexpr int kHandOutAhead = 32;  // as early as scales are loaded
  int tile = blockIdx.x / Config::kClusterSize;

  __device__ __forceinline__ int take() const { return tile + gridDim.x / Config::kClusterSize; }
  __device__ __forceinline__ int hand_out(int taken) const { return taken; }
  __device__ __forceinline__ void next(int = 0) { tile = take(); }

  // NOTE: the condition is on the loop's counter. Otherwise ptxas no longer sees that the lanes of
  // a warp stay together, and keeps the position in the ring for each lane.
  __device__ __forceinline__ bool has_tile(int count) const {
    return tile < (grouping_of<Config>() == Grouping::kNone ? count : uniform(count));
  }
};

// Tiles handed out one by one, to the CTA that is done first. They are handed out late, so that the
// counter in global memory has answered, but early enough that the tile's first scales arrive in
// time.
struct DynamicWalk {
  static constexpr int kHandOutAhead = 5;
  int tile = blockIdx.x;
  int step = 0;
  TileQueueCursor queue;

  __device__ __forceinline__ explicit DynamicWalk(TileQueue& queue) : queue{queue} {}
  __device__ __forceinline__ void next(int lane) { tile = queue.receive(lane), ++step; }
  __device__ __forceinline__ void next() { tile = queue.receive(); }

  // NOTE: the condition is on the steps and not on the tile, for the reason given above.
  __device__ __forceinline__ bool has_tile(int count) const {
    return step < uniform(tile < count ? 0x7fffffff : 0);
  }
};

}  // namespace jax_fp8gemm
