// The ring of shared-memory stages between the producer and the consumers.
#pragma once

#include "ptx/mbarrier.cuh"

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

  // Moves on by any number of stages.
  __device__ __forceinline__ void skip(uint32_t count) {
    const uint32_t position = stage + count;
    stage = position % kNumStages;
    phase ^= position / kNumStages & 1;
  }
};

// Arrivals that complete a phase of the full barrier: the lane that starts the bulk copies and
// announces their bytes; the warp that stores single scales, if there are any; and the warp that
// quantises lhs, if one does.
__device__ constexpr int full_arrivals(bool writes_scales, bool quantizes_lhs) {
  return 1 + writes_scales + quantizes_lhs;
}

// Arrivals that complete a phase of the empty barrier: every consumer warp of every CTA that the
// stage is shared with. More would deadlock the producer, fewer would let it overwrite operands
// that are still read.
__device__ constexpr int empty_arrivals(int num_consumers, int cluster_size) {
  return num_consumers * 4 * cluster_size;
}

}  // namespace jax_fp8gemm
