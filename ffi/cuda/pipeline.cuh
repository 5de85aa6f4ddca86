// The ring of shared-memory stages between the producer and the consumers.
#pragma once

#include "mbarrier.cuh"

namespace jax_fp8gemm {

// A position in the ring. `phase` flips at each wrap; it is the parity to wait for on the full
// barrier, and its inverse on the empty barrier (a fresh barrier counts as "previous phase done",
// so the producer starts without waiting).
template <int kNumStages>
struct RingCursor {
  uint32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kNumStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Lanes that copy the lhs scales: none where TMA can, whose strides are multiples of 16 bytes
// ([k/128][num_rows] in memory); else one a row, up to a warp.
__device__ constexpr int num_copy_lanes(int num_rows) {
  return num_rows % 4 == 0 ? 0 : (num_rows < 32 ? num_rows : 32);
}

// Arrivals that complete a phase of the full barrier: the TMA lane, which announces the bytes; in
// 1d2d the lane that stores the block scales; each lane that copies lhs scales.
__device__ constexpr int full_arrivals(bool is_1d1d, int num_rows) {
  return 1 + (is_1d1d ? 0 : 1) + num_copy_lanes(num_rows);
}

// Arrivals that complete a phase of the empty barrier: every consumer warp of every CTA that the
// stage is shared with. More would deadlock the producer, fewer would let it overwrite operands
// that are still read.
__device__ constexpr int empty_arrivals(int num_consumers, int cluster_size) {
  return num_consumers * 4 * cluster_size;
}

}  // namespace jax_fp8gemm
