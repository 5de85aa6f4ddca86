// Bulk tensor copies, the "TMA" (PTX ISA, cp.async.bulk.tensor). Coordinates are (inner, outer), in
// elements; whatever lies outside the tensor is read as zero and not written.
#pragma once

#include "ptx/mbarrier.cuh"

namespace jax_fp8gemm {

__device__ __forceinline__ void tma_prefetch_descriptor(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(const TensorMap* map, Barrier* barrier, void* smem,
                                            int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(inner), "r"(outer)
      : "memory");
}

// Copies a multiple of 16 bytes between multiples of 16 (PTX ISA, cp.async.bulk).
__device__ __forceinline__ void bulk_load(Barrier* barrier, void* smem, const void* global,
                                          uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}

// Writes the box to the same offset in every CTA of `cta_mask`, and completes the bytes on each
// one's barrier.
__device__ __forceinline__ void tma_load_2d_multicast(const TensorMap* map, Barrier* barrier,
                                                      void* smem, int inner, int outer,
                                                      uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(inner), "r"(outer), "h"(cta_mask)
      : "memory");
}

__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* smem, int inner,
                                             int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(smem_address(smem)), "r"(inner), "r"(outer)
      : "memory");
}

// Brings the box into the L2 (PTX ISA, cp.async.bulk.prefetch.tensor).
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap* map, int inner, int outer) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(inner),
               "r"(outer)
               : "memory");
}

// Adds the box to global memory, f32.
__device__ __forceinline__ void tma_reduce_add_2d(const TensorMap* map, const void* smem, int inner,
                                                  int outer) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], "
      "[%1];" ::"l"(map),
      "r"(smem_address(smem)), "r"(inner), "r"(outer)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kNumPending committed groups of this thread still read shared memory.
template <int kNumPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNumPending) : "memory");
}

}  // namespace jax_fp8gemm
