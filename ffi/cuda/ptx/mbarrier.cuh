// mbarrier in shared memory (PTX ISA, "Parallel Synchronization and Communication Instructions:
// mbarrier").
#pragma once

#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

using Barrier = uint64_t;

__device__ __forceinline__ void mbarrier_init(Barrier* barrier, uint32_t arrival_count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(arrival_count)
               : "memory");
}

// Makes the initialised barriers visible to the async proxy and to the other CTAs of the cluster.
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also announces `bytes` to come from TMA in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Barrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives on the same barrier of CTA `rank` of the cluster. NOTE: the form with .release.cluster
// would cost a GPU-scope MEMBAR; nothing is written for the peer here, so the default semantics
// suffice.
__device__ __forceinline__ void mbarrier_arrive_remote(Barrier* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// Whether the phase with this parity has completed.
__device__ __forceinline__ bool mbarrier_test(Barrier* barrier, uint32_t parity) {
  uint32_t is_done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(is_done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return is_done != 0;
}

// Waits until the phase with this parity has completed.
__device__ __forceinline__ void mbarrier_wait(Barrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace jax_fp8gemm
