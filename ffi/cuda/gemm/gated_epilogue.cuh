// Quantises act(gate) * up of a product [gate | up], in place of storing the product.
//
// A tile has 128 columns of gate, and the same 128 of up behind them. A thread holds gate and up of
// the same elements, and the four lanes that share a row hold a whole scale block of h. gate and up
// are rounded to bf16 first. So h has the bits that the quantiser of SwiGLU makes of a product that
// was stored (quantize/swiglu_source.cuh).
#pragma once

#include "gemm/batches.cuh"
#include "quantize/activation.cuh"
#include "quantize/quantize_scale.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct GatedEpilogue {
  using Tile = jax_fp8gemm::Tile<Config>;
  static constexpr int kColumns = 128;                // of h, in a tile
  static constexpr int kFirstUp = Config::kSubN / 2;  // of a thread's sums
  static constexpr int kWarpRows = 16;

  Batches<Config>& batches;

  __device__ __forceinline__ explicit GatedEpilogue(Batches<Config>& batches) : batches(batches) {}

  // Rows from row_end on are not stored. column: of h. NOTE: the thread index is read anew, as in
  // Consumer::store.
  __device__ __forceinline__ void store(int row, int row_end, int column) {
    static_assert(!Config::kIsGated || (Config::kBlockN == 2 * kColumns &&
                                        Config::kSubN == kColumns && Tile::kMSubs == 1),
                  "a thread must hold gate and up of the same elements");
    const GemmParams& params = batches.params;
    const int thread = thread_index(), warp = thread / 32 % 4, lane = thread % 32;
    // A warp stages its own 16 rows of h. In a row the 16-byte chunk c lies at chunk c ^ (row % 8).
    uint8_t* staged = batches.shared.slabs[batches.consumer] + warp * kWarpRows * kColumns;
    const int first_row = row + warp * kWarpRows;
    __syncwarp();  // every lane has read what was staged before
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local_row = lane / 4 + 8 * half;
      const BlockScale block = activate(half);
      if (lane % 4 == 0 && first_row + local_row < row_end) {
        params.out_scale[size_t(column / kColumns) * params.m + first_row + local_row] =
            block.scale;
      }
      uint8_t* target = staged + local_row * kColumns + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float* h = &batches.promoted[0][4 * j + 2 * half];
        *reinterpret_cast<uint16_t*>(target + (j / 2 ^ local_row % 8) * 16 + j % 2 * 8) =
            round_fp8x2<Config::kE5M2>(mul_rn(h[0], block.factor), mul_rn(h[1], block.factor));
      }
    }
    __syncwarp();
    uint8_t* out = static_cast<uint8_t*>(params.out);
    const int chunk = lane % 8;
#pragma unroll
    for (int first = 0; first < kWarpRows; first += 4) {
      const int local_row = first + lane / 8;
      if (first_row + local_row < row_end) {
        *reinterpret_cast<uint4*>(out + size_t(first_row + local_row) * (params.n / 2) + column +
                                  chunk * 16) =
            *reinterpret_cast<const uint4*>(staged + local_row * kColumns +
                                            (chunk ^ local_row % 8) * 16);
      }
    }
  }

 private:
  // Computes h of this thread's row in one half of the warp's rows, in the place of gate. Returns
  // the scale of the row.
  __device__ __forceinline__ BlockScale activate(int half) {
    float (&sums)[Config::kBlockN / 2] = batches.promoted[0];
    uint32_t amax = 0;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int i = 4 * j + 2 * half;
      const uint32_t gates = pack_bf16(sums[i], sums[i + 1]);
      const uint32_t ups = pack_bf16(sums[kFirstUp + i], sums[kFirstUp + i + 1]);
      sums[i] = h_of(gates << 16, ups << 16);
      sums[i + 1] = h_of(gates & 0xffff0000, ups & 0xffff0000);
      amax = max_u32(amax, max_u32(magnitude(sums[i]), magnitude(sums[i + 1])));
    }
    amax = max_u32(amax, __shfl_xor_sync(0xffffffff, amax, 1));
    amax = max_u32(amax, __shfl_xor_sync(0xffffffff, amax, 2));
    return block_scale<Config>(amax);
  }

  // gate, up: bits of f32.
  __device__ __forceinline__ static float h_of(uint32_t gate, uint32_t up) {
    return gated<Config, SwigluPart::kH>(__uint_as_float(gate), __uint_as_float(up), 0.0f);
  }

  __device__ __forceinline__ static uint32_t magnitude(float x) {
    return __float_as_uint(x) & 0x7fffffff;
  }
};

}  // namespace jax_fp8gemm
