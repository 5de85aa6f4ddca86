// Dequantisation scales in the consumers, and the promotion that applies them.
//
// The bits are a contract, the same in every config, for k-blocks in ascending order:
//   1d2d: promoted = fma(lhs_scale * rhs_scale, accum, promoted)
//   1d1d: promoted = fma(rhs_scale, lhs_scale * accum, promoted)
// with each product rounded. NOTE: 1d1d has a product of scales for every element. Scaling the
// accumulator twice needs no register for it, which took 3-10 % off the kernel.
#pragma once

#include "mbarrier.cuh"

namespace jax_fp8gemm {

// Copies one f32 to shared memory without a register in between; zero where `is_inside` is false
// (PTX ISA, cp.async).
__device__ __forceinline__ void cp_async_f32(float* smem, const float* global, bool is_inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(smem)),
               "l"(global), "r"(is_inside ? 4 : 0)
               : "memory");
}

// Arrives on `barrier` once this thread's earlier cp.async have landed; the barrier counts on one
// such arrival a thread.
__device__ __forceinline__ void cp_async_arrive(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Copies the kCount scales of rows first .. first + kCount - 1 from an array whose row index is
// minor, by one warp. 4 bytes at a time: no alignment rule on the number of rows, hence none on m,
// n or the start of a group.
template <int kCount>
__device__ __forceinline__ void copy_row_scales(float* smem, const float* scales, int first,
                                                int num_rows, int lane) {
#pragma unroll
  for (int i = 0; i < kCount; i += 32) {
    const int row = first + i + lane;
    const bool is_inside = row < num_rows;
    if (kCount % 32 == 0 || i + lane < kCount)
      cp_async_f32(smem + i + lane, scales + (is_inside ? row : 0), is_inside);
  }
}

// The 1d2d scales of a tile's kNumBlocks column blocks, one per block and k-block, in one warp:
// lane l holds those of k-block 32c + l of the current chunk c; the next chunk, or the next tile's
// first, is loaded a chunk ahead.
template <int kNumBlocks>
struct BlockScales {
  float chunk[kNumBlocks], next_chunk[kNumBlocks];

  // scales: rows of num_k_blocks; `row` is that of the tile's first column block, `column` its
  // first column of n.
  __device__ __forceinline__ void prefetch(const float* scales, int n, int num_k_blocks, int row,
                                           int column, int first_k_block) {
    const int k_block = first_k_block + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kNumBlocks; ++i) {
      const bool is_inside = k_block < num_k_blocks && (column / 128 + i) * 128 < n;
      next_chunk[i] = is_inside ? __ldg(scales + size_t(row + i) * num_k_blocks + k_block) : 0.f;
    }
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < kNumBlocks; ++i) chunk[i] = next_chunk[i];
  }
};

// Promotes the 64 x kN accumulators of one k-block, all columns under one rhs scale (1d2d). scale:
// the products of the rhs scale with those of the thread's two rows.
template <int kRegs>
__device__ __forceinline__ void promote_1d2d(float* promoted, const float (&accum)[kRegs],
                                             const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) promoted[i] = __fmaf_rn(scale[i / 2 % 2], accum[i], promoted[i]);
}

// The same where column block boundaries fall inside: columns from `boundary` on are under the
// latter scales.
template <int kRegs>
__device__ __forceinline__ void promote_1d2d_split(float* promoted, const float (&accum)[kRegs],
                                                   const float (&former)[2],
                                                   const float (&latter)[2], int boundary) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) {
    const float scale = i / 4 * 8 < boundary ? former[i / 2 % 2] : latter[i / 2 % 2];
    promoted[i] = __fmaf_rn(scale, accum[i], promoted[i]);
  }
}

// One scale a column (1d1d): rhs[2j + c] is that of column 8j + 2(l%4) + c. Overwrites accum.
template <int kRegs>
__device__ __forceinline__ void promote_1d1d(float* promoted, float (&accum)[kRegs],
                                             const float (&lhs)[2], const float (&rhs)[kRegs / 2]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) accum[i] = __fmul_rn(lhs[i / 2 % 2], accum[i]);
#pragma unroll
  for (int i = 0; i < kRegs; ++i) {
    promoted[i] = __fmaf_rn(rhs[i / 4 * 2 + i % 2], accum[i], promoted[i]);
  }
}

}  // namespace jax_fp8gemm
