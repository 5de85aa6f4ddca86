// Types and the single PTX instructions that belong to no other wrapper header.
//
// Every wrapper is one instruction. "memory" is stated wherever the instruction orders memory.
// Sections refer to the PTX ISA, https://docs.nvidia.com/cuda/parallel-thread-execution.
#pragma once

namespace jax_fp8gemm {

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;

// CUtensorMap as the driver encodes it: opaque, 128 bytes.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
int ceil_div(int64_t a, int64_t b) = delete;  // would be cut to 32 bits

__device__ __forceinline__ uint32_t smem_address(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

// Loads, section "ld.global.nc".

// A read-only load. NOTE: volatile, or the compiler moves loads down to their first uses, and fewer
// are in flight. NOTE: with L1::no_allocate quantisers take up to 1.07 of the time.
__device__ __forceinline__ void load_16_bytes(uint32_t (&words)[4], const void* source) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(source));
}

// The same of 4 bytes that other threads read too.
__device__ __forceinline__ uint32_t load_4_bytes(const void* source) {
  uint32_t word;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(source));
  return word;
}

// Special registers.

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// threadIdx.x, read anew: no register has to keep it until a role begins.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// elect.sync: true in one lane of a converged warp, always the same one. NOTE: `lane == 0` instead
// makes ptxas wrap every TMA instruction in a loop over the active lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(is_elected));
  return is_elected != 0;
}

// Register reallocation between warpgroups (PTX ISA, setmaxnreg). kNumRegs: a multiple of 8
// in 24..256.

template <int kNumRegs>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kNumRegs));
}

template <int kNumRegs>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kNumRegs));
}

// Barriers and fences.

__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Orders this thread's ordinary shared-memory accesses before later accesses by TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Asynchronous copies by threads (PTX ISA, cp.async), which go past the L1.

// Copies 16 bytes to shared memory, from a multiple of 16: the first `num_bytes` of them, then
// zeros.
__device__ __forceinline__ void cp_async_16(uint32_t address, const void* source, int num_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
               "r"(num_bytes)
               : "memory");
}

// Waits for all copies of this thread, which then sees what they wrote.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Stores 16 bytes in shared memory, at a multiple of 16.
__device__ __forceinline__ void store_shared_16(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Loads 16 bytes of shared memory, from a multiple of 16.
__device__ __forceinline__ void load_shared_16(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Loads 8 bytes of shared memory, from a multiple of 8.
__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(address)
               : "memory");
  return words;
}

// Conversion and storing of accumulators.

// Rounds two f32 to bf16, to nearest even; `low` goes to the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Likewise to f16; what is too large becomes an infinity.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Stores four 8x8 matrices of 16-bit elements; lane l gives the row address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same of two matrices: only the addresses of lanes 0 .. 15 count.
__device__ __forceinline__ void stmatrix_x2(uint32_t address, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r0),
               "r"(r1)
               : "memory");
}

// The same of four transposed matrices: lane l gives the address of column l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

}  // namespace jax_fp8gemm
