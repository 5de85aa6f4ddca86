// Stores the promoted sums of registers to the output in global memory.
#pragma once

#include "gemm/slabs.cuh"
#include "ptx/tma.cuh"

namespace jax_fp8gemm {

// How the kTotal slabs of a tile pass through a ring of kSlabs, which TMA stores drain.
template <int kTotal, int kSlabs>
struct SlabRing {
  // Slabs that are written between two barriers: all of them, or half of the ring, so that the
  // other half drains meanwhile.
  static constexpr int kChunk = kSlabs >= kTotal ? kTotal : (kSlabs > 1 ? kSlabs / 2 : 1);
  static_assert(kTotal % kChunk == 0, "slabs are written a chunk at a time");

  // Waits until the stores that used the chunk at `first` before have read it. Where the ring does
  // not divide the tile, the last tile may have ended with the first slabs.
  static __device__ __forceinline__ void wait(int first, bool is_store_warp, int consumer) {
    constexpr int kPending = kSlabs >= kTotal ? 0 : kSlabs / kChunk - 1;
    const bool waits_for_all = first == 0 && kTotal % kSlabs != 0;
    if (is_store_warp && elect_one()) {
      waits_for_all ? tma_store_wait_read<0>() : tma_store_wait_read<kPending>();
    }
    named_barrier_sync(1 + consumer, 128);
  }
};

// Stores the tile of one consumer warpgroup by TMA, through slabs of 64 rows of 128 bytes: 64 bf16
// or 32 f32 columns. In a slab the 16-byte chunk c of row r lies at chunk c ^ (r % 8), the 128-byte
// swizzle, so that neither the writes nor TMA have bank conflicts. Where 64 does not divide
// kBlockN, bf16 slabs have 32 columns, 64 bytes, and the 64-byte swizzle: c ^ (r / 2 % 4); then
// there are twice kNumSlabs. Where 32 does not divide it, they have all columns and no swizzle:
// rows are an odd multiple of 16 bytes apart, or of 32, where two lanes meet in a bank. Each
// warpgroup owns its slabs and its stores; nothing here waits for another warpgroup. kAccumulate
// adds to the output: each element has one addition, so the result does not depend on any order.
template <bool kIsF32, bool kAccumulate, int kMSubs, int kBlockN, int kNumSlabs, int kRegs>
__device__ __forceinline__ void store_tma(const TensorMap* map, uint8_t* slabs,
                                          const float (&promoted)[kMSubs][kRegs], int row,
                                          int column, int consumer, int warp, int lane) {
  constexpr int kColumns = kIsF32 ? 32 : slab_columns(kBlockN);
  constexpr bool kHasAllColumns = kColumns % 32 != 0;
  constexpr int kRowBytes = kColumns * (kIsF32 ? 4 : 2);
  constexpr int kSlabBytes = kSlabRows * kRowBytes;
  constexpr int kSlabs = kNumSlabs * slab_bytes(kBlockN) / kSlabBytes;
  constexpr int kSlabsPerRow = kBlockN / kColumns;
  constexpr int kTotal = kMSubs * kSlabsPerRow;
  using Ring = SlabRing<kTotal, kSlabs>;
  const bool is_store_warp = warp == 0;
  const int local_row = warp * 16 + (kIsF32 ? lane / 4 : lane % 16);
#pragma unroll
  for (int first = 0; first < kTotal; first += Ring::kChunk) {
    Ring::wait(first, is_store_warp, consumer);
#pragma unroll
    for (int slab = first; slab < first + Ring::kChunk; ++slab) {
      const float* d = promoted[slab / kSlabsPerRow] + (slab % kSlabsPerRow) * (kColumns / 2);
      uint8_t* rows = slabs + (slab % kSlabs) * kSlabBytes + local_row * kRowBytes;
      if constexpr (kIsF32) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint8_t* pair = rows + ((2 * j + lane % 4 / 2) ^ (local_row % 8)) * 16 + lane % 2 * 8;
          *reinterpret_cast<float2*>(pair) = make_float2(d[4 * j], d[4 * j + 1]);
          *reinterpret_cast<float2*>(pair + 8 * 128) = make_float2(d[4 * j + 2], d[4 * j + 3]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 2) {
          const uint32_t swizzle = kHasAllColumns     ? 0
                                   : kRowBytes == 128 ? local_row % 8
                                                      : local_row / 2 % 4;
          const uint32_t chunk = (j + lane / 16) ^ swizzle;
          if (j + 1 == kColumns / 8) {
            stmatrix_x2(smem_address(rows) + chunk * 16, pack_bf16(d[4 * j], d[4 * j + 1]),
                        pack_bf16(d[4 * j + 2], d[4 * j + 3]));
            continue;
          }
          stmatrix_x4(smem_address(rows) + chunk * 16, pack_bf16(d[4 * j], d[4 * j + 1]),
                      pack_bf16(d[4 * j + 2], d[4 * j + 3]), pack_bf16(d[4 * j + 4], d[4 * j + 5]),
                      pack_bf16(d[4 * j + 6], d[4 * j + 7]));
        }
      }
    }
    // Order the writes of all four warps before the TMA that reads them.
    fence_proxy_async_shared();
    named_barrier_sync(1 + consumer, 128);
    if (is_store_warp && elect_one()) {
#pragma unroll
      for (int slab = first; slab < first + Ring::kChunk; ++slab) {
        const uint8_t* source = slabs + (slab % kSlabs) * kSlabBytes;
        const int slab_column = column + (slab % kSlabsPerRow) * kColumns;
        const int slab_row = row + (slab / kSlabsPerRow) * 64;
        if constexpr (kAccumulate) {
          tma_reduce_add_2d(map, source, slab_column, slab_row);
        } else {
          tma_store_2d(map, source, slab_column, slab_row);
        }
      }
      tma_store_commit();
    }
  }
}

// Writes the transpose of a warpgroup's 64 x kN part, bf16, as kN rows of 64, swizzled as above.
template <int kN>
__device__ __forceinline__ void write_slab_transposed(uint8_t* slab, const float* d, int warp,
                                                      int lane) {
#pragma unroll
  for (int j = 0; j < kN / 8; j += 2) {
    const int row = 8 * (j + lane / 16) + lane % 8;
    const uint32_t chunk = (2 * warp + lane / 8 % 2) ^ (row % 8);
    stmatrix_x4_trans(smem_address(slab + row * 128) + chunk * 16,
                      pack_bf16(d[4 * j], d[4 * j + 1]), pack_bf16(d[4 * j + 2], d[4 * j + 3]),
                      pack_bf16(d[4 * j + 4], d[4 * j + 5]), pack_bf16(d[4 * j + 6], d[4 * j + 7]));
  }
}

// Stores the tile of one consumer warpgroup straight from registers: the four lanes that share a
// row write 32 (f32) or 16 (bf16) neighbouring bytes. n is a multiple of 8, so a pair of columns is
// inside or outside as a whole.
template <bool kIsF32, bool kAccumulate, int kMSubs, int kBlockN, int kRegs>
__device__ __forceinline__ void store_direct(void* out, const float* accum,
                                             const float (&promoted)[kMSubs][kRegs], int m, int n,
                                             int row, int column, int warp, int lane) {
#pragma unroll
  for (int mi = 0; mi < kMSubs; ++mi) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int out_row = row + mi * 64 + warp * 16 + lane / 4 + half * 8;
      const size_t offset = size_t(out_row) * n + column + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
        if (out_row < m && column + 8 * j < n) {
          float2 pair =
              make_float2(promoted[mi][4 * j + 2 * half], promoted[mi][4 * j + 2 * half + 1]);
          if constexpr (kAccumulate) {
            const float2 old = *reinterpret_cast<const float2*>(accum + offset + 8 * j);
            // NOTE: keeps subnormal numbers, as the addition by TMA does on an H200: a result must
            // not depend on how it is stored.
            pair = make_float2(__fadd_rn(old.x, pair.x), __fadd_rn(old.y, pair.y));
          }
          if constexpr (kIsF32) {
            *reinterpret_cast<float2*>(static_cast<float*>(out) + offset + 8 * j) = pair;
          } else {
            *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + offset + 8 * j) =
                pack_bf16(pair.x, pair.y);
          }
        }
      }
    }
  }
}

}  // namespace jax_fp8gemm
