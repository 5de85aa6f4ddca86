// The slabs of shared memory in which a consumer stages its part of a result for TMA.
#pragma once

namespace jax_fp8gemm {

constexpr int kSlabRows = 64;

// Columns of a slab of bf16: 128 bytes of a row, or 64 where 64 does not divide the columns of a
// tile, or all of them where 32 does not. Mirrors SlabColumns.
__device__ constexpr int slab_columns(int block_n) {
  return block_n % 32 != 0 ? block_n : block_n % 64 != 0 ? 32 : 64;
}

// Bytes that Config::kNumSlabs counts as one: two slabs where rows have 64 bytes. Mirrored in
// DynamicSmemBytes.
__device__ constexpr int slab_bytes(int block_n) {
  return kSlabRows * (block_n % 32 != 0 ? 2 * block_n : 128);
}

}  // namespace jax_fp8gemm
