// Stores the promoted sums of registers transposed: columns of the tile are rows of out.
//
// A weight gradient whose 128x128 scales belong to the rows of its result has that operand as rhs,
// because a thread holds two rows of a tile and many columns. Its result is then transposed here.
#pragma once

#include "gemm/epilogue.cuh"
#include "ptx/tma.cuh"

namespace jax_fp8gemm {

// Writes the transpose of a warpgroup's 64 x 32 part, f32, as two boxes of 32 rows of 32, one of
// the first 32 rows of the part and one of the others. In a box the 16-byte chunk c of row r lies
// at chunk c ^ (r % 8), the 128-byte swizzle. The lanes of a warp write 32 different banks.
__device__ __forceinline__ void write_boxes_transposed(uint8_t* slab, const float* d, int warp,
                                                       int lane) {
  uint8_t* box = slab + warp / 2 * 4096 + lane / 4 % 4 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 2 * (lane % 4) + c;  // of every eight
      const int chunk = (warp % 2 * 4 + half * 2 + lane / 16) ^ row;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<float*>(box + (8 * j + row) * 128 + chunk * 16) = d[4 * j + 2 * half + c];
      }
    }
  }
}

// Stores the tile of one consumer warpgroup by TMA, as store_tma does, but transposed: `row` and
// `column` are those of out, (column, row) of the product. A slab holds 64 rows of the tile and 64
// (bf16) or 32 (f32) columns. f32 slabs are stored as two boxes.
template <bool kIsF32, bool kAccumulate, int kMSubs, int kBlockN, int kNumSlabs, int kRegs>
__device__ __forceinline__ void store_tma_transposed(const TensorMap* map, uint8_t* slabs,
                                                     const float (&promoted)[kMSubs][kRegs],
                                                     int row, int column, int consumer, int warp,
                                                     int lane) {
  constexpr int kColumns = kIsF32 ? 32 : 64;
  constexpr int kSlabBytes = 64 * 128;
  constexpr int kBoxes = kIsF32 ? 2 : 1;
  constexpr int kSlabsPerRow = kBlockN / kColumns;
  constexpr int kTotal = kMSubs * kSlabsPerRow;
  using Ring = SlabRing<kTotal, kNumSlabs>;
  static_assert(kBlockN % kColumns == 0, "slabs are whole");
  const bool is_store_warp = warp == 0;
#pragma unroll
  for (int first = 0; first < kTotal; first += Ring::kChunk) {
    Ring::wait(first, is_store_warp, consumer);
#pragma unroll
    for (int slab = first; slab < first + Ring::kChunk; ++slab) {
      const float* d = promoted[slab / kSlabsPerRow] + slab % kSlabsPerRow * (kColumns / 2);
      uint8_t* target = slabs + slab % kNumSlabs * kSlabBytes;
      if constexpr (kIsF32) {
        write_boxes_transposed(target, d, warp, lane);
      } else {
        write_slab_transposed<kColumns>(target, d, warp, lane);
      }
    }
    // Order the writes of all four warps before the TMA that reads them.
    fence_proxy_async_shared();
    named_barrier_sync(1 + consumer, 128);
    if (is_store_warp && elect_one()) {
#pragma unroll
      for (int slab = first; slab < first + Ring::kChunk; ++slab) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          const uint8_t* source = slabs + slab % kNumSlabs * kSlabBytes + box * 4096;
          const int inner = column + slab / kSlabsPerRow * 64 + box * 32;
          const int outer = row + slab % kSlabsPerRow * kColumns;
          if constexpr (kAccumulate) {
            tma_reduce_add_2d(map, source, inner, outer);
          } else {
            tma_store_2d(map, source, inner, outer);
          }
        }
      }
      tma_store_commit();
    }
  }
}

// Stores it straight from registers: eight lanes write 32 (f32) or 16 (bf16) neighbouring bytes of
// a row. first_out_row is that of the group; m and n are the extents of the product of the group.
template <bool kIsF32, bool kAccumulate, int kMSubs, int kBlockN, int kRegs>
__device__ __forceinline__ void store_direct_transposed(void* out, const float* accum,
                                                        const float (&promoted)[kMSubs][kRegs],
                                                        int end, int m, int n, int first_out_row,
                                                        int row, int column, int warp, int lane) {
#pragma unroll
  for (int mi = 0; mi < kMSubs; ++mi) {
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      const int tile_row = row + mi * 64 + warp * 16 + lane / 4 + i / 2 % 2 * 8;
      const int tile_column = column + i / 4 * 8 + 2 * (lane % 4) + i % 2;
      if (tile_row < end && tile_column < n) {
        const size_t offset = size_t(first_out_row + tile_column) * m + tile_row;
        float sum = promoted[mi][i];
        if constexpr (kAccumulate) sum = __fadd_rn(accum[offset], sum);
        if constexpr (kIsF32) {
          static_cast<float*>(out)[offset] = sum;
        } else {
          static_cast<uint16_t*>(out)[offset] = uint16_t(pack_bf16(sum, 0.f));
        }
      }
    }
  }
}

}  // namespace jax_fp8gemm
