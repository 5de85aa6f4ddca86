// Few rows of lhs in bf16, which a product quantises itself. The bits are those of the quantiser of
// rows.
#pragma once

#include "gemm/tile.cuh"
#include "quantize/quantize_fragment.cuh"
#include "quantize/quantize_scale.cuh"

namespace jax_fp8gemm {

// A k-block of lhs, where the lanes of a warp read it: eight lanes the 128 values of a row, so four
// rows in each of kPasses.
template <int kPasses>
struct LhsCursor {
  static constexpr int kLaneValues = 16;
  const uint8_t* values[kPasses];
  int left[kPasses];  // columns that lhs has from there on; none if it does not have the row

  // At the first k-block.
  __device__ __forceinline__ LhsCursor(const GemmParams& params, int lane) {
    const int column = lane % 8 * kLaneValues;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * 4 + lane / 8;
      values[pass] = static_cast<const uint8_t*>(params.lhs_values) +
                     (int64_t(row) * params.lhs_columns + column) * 2;
      left[pass] = row < params.m ? params.lhs_columns - column : 0;
    }
  }
  __device__ __forceinline__ void skip(int num_k_blocks) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      values[pass] += num_k_blocks * 256;
      left[pass] -= num_k_blocks * 128;
    }
  }
};

// The values of a k-block in the lanes of a warp.
template <bool kIsE5M2, int kPasses>
struct LhsRows {
  static constexpr int kLaneValues = LhsCursor<kPasses>::kLaneValues;
  struct Format {
    static constexpr bool kE5M2 = kIsE5M2, kPow2Scale = false;
  };

  uint32_t words[kPasses][2][4];

  __device__ __forceinline__ static int row(int pass, int lane) { return pass * 4 + lane / 8; }

  // Loads the k-block which is `ahead` of the cursor; zeros where lhs has no values. NOTE: with
  // addresses and bounds computed anew for each, the first loads took 300 instructions.
  __device__ __forceinline__ void load(const LhsCursor<kPasses>& from, int ahead) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t (&half_words)[4] = words[pass][half];
        half_words[0] = half_words[1] = half_words[2] = half_words[3] = 0;
        if (from.left[pass] > ahead * 128 + half * 8) {
          load_16_bytes(half_words, from.values[pass] + ahead * 256 + half * 16);
        }
      }
    }
  }

  // Computes the scales of the rows, in all of their lanes.
  __device__ __forceinline__ void scale(BlockScale (&block)[kPasses]) const {
    uint32_t amax[kPasses];  // of two values each
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      amax[pass] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        amax[pass] = max_u16x2(amax[pass], words[pass][i / 4][i % 4] & 0x7fff7fff);
      }
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        amax[pass] = max_u16x2(amax[pass], __shfl_xor_sync(0xffffffff, amax[pass], step));
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      block[pass] = block_scale<Format>(max_u32(amax[pass] << 16, amax[pass] & 0xffff0000));
    }
  }

  // Stores what `block` makes of a pass in `tile`, rows of 128 bytes in the 128-byte swizzle:
  // chunk c of 16 bytes of row r lies at c ^ r % 8.
  __device__ __forceinline__ void store(uint8_t* tile, int pass, const BlockScale& block,
                                        int lane) const {
    uint2 bytes[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t word = words[pass][half][j / 2];
        x[j] = mul_rn(__uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000), block.factor);
      }
      bytes[half] = round_fp8x8<kIsE5M2>(x);
    }
    uint8_t* target = tile + row(pass, lane) * 128 + ((lane ^ row(pass, lane)) % 8) * kLaneValues;
    *reinterpret_cast<uint4*>(target) = {bytes[0].x, bytes[0].y, bytes[1].x, bytes[1].y};
  }
};

}  // namespace jax_fp8gemm
