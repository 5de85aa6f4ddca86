// Shared memory of the other CTAs of a cluster (PTX ISA, mapa, ld and st.async).
#pragma once

#include "ptx/mbarrier.cuh"

namespace jax_fp8gemm {

// The address, in the shared memory of the cluster, of what CTA `rank` has at this address.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Loads 4 f32 from an address of cluster_address(), a multiple of 16 bytes.
__device__ __forceinline__ float4 load_from_cluster(uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Stores 1, 2 or 4 f32, to a multiple of as many, and completes their bytes on `barrier`, which
// must be in the same CTA. Both are addresses of cluster_address().
template <int kCount>
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier,
                                            const float* values) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  if constexpr (kCount == 4) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier)
        : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
        "[%3];" ::"r"(address),
        "f"(values[0]), "f"(values[1]), "r"(barrier)
        : "memory");
  } else {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
            address),
        "f"(values[0]), "r"(barrier)
        : "memory");
  }
}

}  // namespace jax_fp8gemm
