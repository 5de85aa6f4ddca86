// Rows of an FP8 x by number, where a quantiser holds its elements: row i of what is quantised is
// x[rows[i]], in f32 times its scales, then times weights[i] if it is weighted. x (s, k) has scales
// [k/128][s]. A number that is no row of x is the nearest one.
//
// A row is behind two loads, its number's and its own. CTAs that take tile after tile load numbers
// two tiles ahead, into a register, and rows, scales and weights one tile ahead. A warp's lanes
// share what they load: a lane has the number, scale and weight of one of the 16 rows, and copies
// 16 bytes of 4 rows. A fragment takes 8 bytes of 8 rows, so lanes read what others copied.
#pragma once

#include "quantize/quantize_source.cuh"

namespace jax_fp8gemm {

template <int kInput, bool kIsWeighted>
struct GatherFp8Source : DirectSource {
  using Elements = Fragment<kF32>;

  static constexpr int kPrefetchBytes = kFragmentRows * kFragmentColumns;
  static constexpr bool kLooksUpRows = true;
  // A k-block of x (2 MiB of 16384 rows) then stays in the L2 until the last of a row's copies.
  static constexpr bool kWalksDown = true;

  static __device__ __forceinline__ bool is_aligned(int k) { return k % 16 == 0; }

  // Of the lane's row.
  struct Factors {
    float scale, weight;
  };

  // Starts to load the number of the lane's row, if it is one.
  static __device__ __forceinline__ int load_number(const QuantizeParams& params, int first_row,
                                                    int row_end) {
    const int row = first_row + lane_row();
    int number = 0;
    if (row < row_end) number = load_4_bytes(params.rows + row);
    return number;
  }

  // Starts to copy columns first_column.. of the warp's rows, zeros from row_end and column k on,
  // and to load the factors of the lane's row.
  static __device__ __forceinline__ Factors prefetch(const QuantizeParams& params, int number,
                                                     int first_row, int first_column, int row_end) {
    const int row = first_row + lane_row();
    const bool is_row = row < row_end;
    const int source = is_row ? min(max(number, 0), params.num_sources - 1) : -1;
    const int lane = threadIdx.x % 32;
    const int column = first_column + lane % 8 * 16;
    const uint32_t target = prefetched() + lane * 16 + lane / 8 * (4 * 128 - 8 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = __shfl_sync(0xffffffff, source, i, 8);
      cp_async_16(target + i * 128, params.x + static_cast<int64_t>(from) * params.k + column,
                  from >= 0 && column < params.k ? 16 : 0);
    }
    Factors factors = {0.0f, 1.0f};
    if (is_row) {
      const float* scales =
          params.x_scale + static_cast<int64_t>(first_column / 128) * params.num_sources;
      factors.scale = __uint_as_float(load_4_bytes(scales + source));
      if (kIsWeighted) factors.weight = __uint_as_float(load_4_bytes(params.weights + row));
    }
    return factors;
  }

  // Sets the elements to what was prefetched. The next prefetch may follow.
  static __device__ __forceinline__ void take(Elements& elements, const Factors& factors) {
    const int lane = threadIdx.x % 32;
    const uint32_t source = prefetched() + lane / 16 * (kFragmentRows * 128) + lane % 16 * 8;
    uint2 bytes[kFragmentRows];
    cp_async_wait_all();
    __syncwarp();  // every lane's copies are there
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) bytes[i] = load_shared_8(source + i * 128);
    __syncwarp();  // every lane has read them
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      set_row(elements, i, bytes[i], __shfl_sync(0xffffffff, factors.scale, i, 16),
              kIsWeighted ? __shfl_sync(0xffffffff, factors.weight, i, 16) : 1.0f);
    }
  }

  template <bool kIsAligned>
  static __device__ __forceinline__ void fill(Elements& elements, const QuantizeParams& params,
                                              int row, int column, int row_end) {
    static_assert(!kIsAligned, "aligned rows are prefetched");
    const float* scales = params.x_scale + static_cast<int64_t>(column / 128) * params.num_sources;
    uint2 bytes[kFragmentRows];
    float scale[kFragmentRows], weight[kFragmentRows];
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      const bool is_row = row + i < row_end;
      const int number = is_row ? __ldg(params.rows + row + i) : 0;
      const int64_t source = min(max(number, 0), params.num_sources - 1);
      bytes[i] = {0, 0};
      scale[i] = is_row && column < params.k ? __ldg(scales + source) : 0.0f;
      weight[i] = kIsWeighted && is_row ? __ldg(params.weights + row + i) : 1.0f;
      const uint8_t* x = params.x + source * params.k + column;
      if (is_row) load_8_bytes<false>(bytes[i], x, params.k - column);
    }
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) set_row(elements, i, bytes[i], scale[i], weight[i]);
  }

 private:
  // Which of the warp's 16 rows is the lane's. Lanes 0..15 have rows 0..7 twice, lanes 16..31 the
  // others. Then lane i of 16 has row i of their fragments, and lane i of 8 has row i, for i < 4,
  // of the 4 rows that these 8 copy: shuffles by constants.
  static __device__ __forceinline__ int lane_row() {
    const int lane = threadIdx.x % 32;
    return lane / 16 * 8 + (lane % 8 ^ (lane & 8) / 2);
  }

  // The 16 rows of the warp, 128 bytes of each.
  static __device__ __forceinline__ uint32_t prefetched() {
    extern __shared__ uint4 dynamic[];
    return smem_address(dynamic) + threadIdx.x / 32 * (32 * kPrefetchBytes);
  }

  static __device__ __forceinline__ void set_row(Elements& elements, int i, uint2 bytes,
                                                 float scale, float weight) {
#pragma unroll
    for (int j = 0; j < kFragmentColumns; j += 2) {
      const uint32_t word = (j < 4 ? bytes.x : bytes.y) >> (j % 4 * 8);
      const uint32_t pair = f16x2_from_fp8x2<kInput == kE5M2>(static_cast<uint16_t>(word));
      elements.set(i, j, scaled(pair, scale, weight));
      elements.set(i, j + 1, scaled(pair >> 16, scale, weight));
    }
  }

  static __device__ __forceinline__ float scaled(uint32_t f16, float scale, float weight) {
    const float x = mul_rn(f32_from_f16(static_cast<uint16_t>(f16)), scale);
    return kIsWeighted ? mul_rn(x, weight) : x;
  }
};

}  // namespace jax_fp8gemm
