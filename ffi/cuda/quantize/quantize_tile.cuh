// One tile of a quantiser, or one warp's rows of it in mode "row": how its elements are scaled,
// rounded and stored. quantize.cuh has the timeline, the layout of shared memory and the results.
#pragma once

#include "quantize/gather_source.cuh"
#include "quantize/quantize_params.cuh"
#include "quantize/quantize_scale.cuh"
#include "quantize/quantize_source.cuh"
#include "quantize/quantize_walk.cuh"
#include "quantize/swiglu_source.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct QuantizedTile {
  static constexpr int kMode = Config::kMode;
  static constexpr bool kIsBlock = kMode >= kBlock;
  // Whether rows of x, or columns, are quantised with 1x128 blocks along them.
  static constexpr bool kScalesRows =
      kMode == kRow || kMode == kRowColumn || kMode == kRowBlockTransposed;
  static constexpr bool kHasBatch = kIsBlock && !kScalesRows && !Config::kIsRagged;
  static constexpr bool kIsPadded = Config::kIsPadded;
  static constexpr bool kStoresRows = kMode != kColumn && kMode != kBlockTransposed;
  static constexpr bool kStoresColumns = kMode != kRow && kMode != kBlock;

  using Walk = QuantizeWalk<Config>;
  using Source = typename Walk::Source;
  using Elements = typename Source::Elements;

  static constexpr int kScaleBlock = Walk::kScaleBlock;
  static constexpr int kNumWarps = Walk::kNumWarps;
  static constexpr int kNumThreads = kNumWarps * 32;
  static constexpr bool kPrefetches = Source::kPrefetchBytes > 0;

  struct SharedStorage {
    union {  // NOTE: without it, two CTAs that prefetch for gradients would not fit an SM
      alignas(16) uint32_t column_amax[kNumWarps][Elements::kVectors][16][4];  // by lane, as loaded
      alignas(16) uint2 transposed[kScaleBlock][16];
    };
    alignas(16) float column_factor[2][16][4];  // of column 8 l + 4 h + j at [h][l][j]
    uint32_t warp_amax[kNumWarps];
  };
  static_assert(sizeof(SharedStorage) <= 48 * 1024, "static shared memory is limited to 48 KiB");

  // CTAs that must fit an SM. Together they have 128 KiB (f32, or "row") or 96 KiB of input in
  // flight.
  static constexpr int kMinCtas =
      (Elements::kElemBytes == 4 ? 512 : (kMode == kRow ? 1024 : 768)) / kNumThreads;
  // An SM has 228 KiB of shared memory. The system takes 1 KiB of it for each CTA.
  static_assert(kMinCtas * ((kStoresColumns ? sizeof(SharedStorage) : 0) +
                            Source::kPrefetchBytes * kNumThreads + 1024) <=
                    228 * 1024,
                "the shared memory of an SM must hold its CTAs'");

  const QuantizeParams& params;
  SharedStorage& shared;
  const int lane, warp;
  typename Walk::Place place;
  Elements elements;

  // Values from one row of `values` or of `transposed` to the next, which has that many.
  static __device__ __forceinline__ int row_pitch(int num_values) {
    return kIsPadded ? (num_values + kScaleBlock - 1) & -kScaleBlock : num_values;
  }

  __device__ __forceinline__ int half() const { return lane / 16; }
  __device__ __forceinline__ int chunk() const { return lane % 16; }
  __device__ __forceinline__ int row(const typename Walk::Place& of) const {
    return of.first_row + half() * kFragmentRows;
  }
  __device__ __forceinline__ int column(const typename Walk::Place& of) const {
    return of.first_column + chunk() * kFragmentColumns;
  }

  // kIsAligned, here and below: k is a multiple of 8 (16 for some sources), and m is one of 8 if
  // columns are stored. Padded results are always aligned.
  template <bool kIsAligned>
  __device__ __forceinline__ void fill() {
    Source::template fill<kIsAligned>(elements, params, row(place), column(place), place.row_end);
  }

  template <bool kIsAligned>
  __device__ __forceinline__ void quantize() {
    if constexpr (kMode == kRow) {
      quantize_rows<kIsAligned>();
    } else {
      quantize_tile<kIsAligned>();
    }
  }

  template <bool kIsAligned>
  __device__ __forceinline__ void quantize_tile() {
    const int m_block = place.m_block;
    if constexpr (kIsBlock) {
      uint32_t warp_amax = share_block_amax();
      if constexpr (kScalesRows) {
        quantize_rows<kIsAligned>();
        if (!place.is_of_group) {
          if (m_block * kScaleBlock >= params.num_columns) return;
          elements.clear();  // for a block of zeros
          warp_amax = share_block_amax();
        }
      }
      const BlockScale block = reduce_block(warp_amax);
      if (threadIdx.x == 0) store_block_scale(block.scale, m_block, place.k_block);
      const float factors[8] = {block.factor, block.factor, block.factor, block.factor,
                                block.factor, block.factor, block.factor, block.factor};
      if constexpr (kStoresRows && !kScalesRows) store_rows<kIsAligned>(factors);
      if constexpr (kStoresColumns) stage_columns(factors);
    } else {
      if (place.is_of_group) share_column_amax();
      if constexpr (kStoresRows) quantize_rows<kIsAligned>();
      if (!place.is_of_group) {
        if (m_block * kScaleBlock >= params.num_columns) return;
        elements.clear();  // for a block of zeros
        share_column_amax();
      }
      __syncthreads();  // every warp's maxima are in shared.column_amax
      if (threadIdx.x < kScaleBlock) scale_column(m_block);
      __syncthreads();  // every factor is in shared.column_factor
      float factors[kFragmentColumns];
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j) {
        factors[j] = shared.column_factor[j / 4][chunk()][j % 4];
      }
      stage_columns(factors);
    }
    if constexpr (kStoresColumns) {
      __syncthreads();  // the transposed tile is complete
      store_columns<kIsAligned>(m_block * kScaleBlock);
    }
  }

  // Scales, rounds and stores the warp's rows.
  template <bool kIsAligned>
  __device__ __forceinline__ void quantize_rows() {
    uint32_t amax[kFragmentRows];
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) amax[i] = elements.row_amax(i);
    // Lanes 2 r and 2 r + 1 get row r of the warp's 16.
    const BlockScale block = block_scale<Config>(reduce_rows<Maximum>(amax, lane));
    const int scale_row = place.first_row + lane / 2;
    if (lane % 2 == 0 && scale_row < place.row_end) {
      const int64_t k_block = place.first_column / kScaleBlock;
      params.scale[k_block * params.m + scale_row] = block.scale;
    }
    float factors[kFragmentRows];
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      factors[i] = __shfl_sync(0xffffffff, block.factor, (lane & 16) + 2 * i);
    }
    store_rows<kIsAligned>(factors);
  }

  // Rounds by rows; factors[i] belongs to row i of the fragment.
  template <bool kIsAligned>
  __device__ __forceinline__ void store_rows(const float (&factors)[kFragmentRows]) {
    const int num_rows = place.row_end - row(place);  // may be negative
    const int64_t first = static_cast<int64_t>(row(place)) * row_pitch(params.k) + column(place);
    uint8_t* target = params.values + first;
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
      float x[8];
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j) x[j] = mul_rn(elements.at(i, j), factors[i]);
      const int count = i < num_rows ? row_pitch(params.k) - column(place) : 0;
      store_8_bytes<kIsAligned>(target, round_fp8x8<Config::kE5M2>(x), count);
      target += row_pitch(params.k);
    }
  }

  // Writes the warp's maximum of every column to shared memory.
  __device__ __forceinline__ void share_column_amax() {
#pragma unroll
    for (int v = 0; v < Elements::kVectors; ++v) {
      uint32_t amax[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        amax[w] = elements.column_amax(v, w);
        amax[w] = Elements::max_words(amax[w], __shfl_xor_sync(0xffffffff, amax[w], 16));
      }
      if (half() == 0) {
        *reinterpret_cast<uint4*>(shared.column_amax[warp][v][chunk()]) = {amax[0], amax[1],
                                                                           amax[2], amax[3]};
      }
    }
  }

  // Computes and stores the scale of column c of the tile, by thread c.
  __device__ __forceinline__ void scale_column(int m_block) {
    const int c = threadIdx.x;
    const int j = c % kFragmentColumns;
    const int v = j / Elements::kVectorElems;
    const int w = j % Elements::kVectorElems * Elements::kElemBytes / 4;
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) {
      amax = Elements::max_words(amax, shared.column_amax[i][v][c / 8][w]);
    }
    const BlockScale block = block_scale<Config>(Elements::f32_bits(amax, j));
    shared.column_factor[j / 4][c / 8][j % 4] = block.factor;
    if (place.first_column + c < params.k) {
      params.transposed_scale[static_cast<int64_t>(m_block) * params.k + place.first_column + c] =
          block.scale;
    }
  }

  // Writes the maximum of the warp's elements to shared memory, and returns it.
  __device__ __forceinline__ uint32_t share_block_amax() {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) amax = max_u32(amax, elements.row_amax(i));
    amax = __reduce_max_sync(0xffffffff, amax);
    if (lane == 0) shared.warp_amax[warp] = amax;
    return amax;
  }

  // Returns the scale of the whole tile, in every thread; `amax` is the warp's maximum.
  __device__ __forceinline__ BlockScale reduce_block(uint32_t amax) {
    __syncthreads();  // every warp's maximum is in shared.warp_amax
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) amax = max_u32(amax, shared.warp_amax[i]);
    return block_scale<Config>(amax);
  }

  __device__ __forceinline__ void store_block_scale(float scale, int m_block, int k_block) {
    const int64_t num_m_blocks =
        ceil_div(Config::kIsRagged ? params.num_columns : params.m, kScaleBlock);
    const int64_t num_k_blocks = ceil_div(params.k, kScaleBlock);
    if constexpr (kMode == kBlockTransposed || kMode == kRowBlockTransposed) {
      params.transposed_scale[k_block * num_m_blocks + m_block] = scale;
    } else {
      params.scale[m_block * num_k_blocks + k_block] = scale;
    }
  }

  // Rounds by columns into shared memory; factors[j] belongs to column j of the fragment.
  __device__ __forceinline__ void stage_columns(const float (&factors)[kFragmentColumns]) {
    const int unit = 2 * warp + half();
#pragma unroll
    for (int j = 0; j < kFragmentColumns; ++j) {
      float x[8];
#pragma unroll
      for (int i = 0; i < kFragmentRows; ++i) x[i] = mul_rn(elements.at(i, j), factors[j]);
      shared.transposed[chunk() * kFragmentColumns + j][unit ^ chunk()] =
          round_fp8x8<Config::kE5M2>(x);
    }
  }

  // Stores a transposed tile of zeros, and their scales.
  template <bool kIsAligned>
  __device__ __forceinline__ void store_empty_tile() {
    const float scale = block_scale<Config>(0).scale;
    if constexpr (kIsBlock) {
      if (threadIdx.x == 0) store_block_scale(scale, place.m_block, place.k_block);
    } else {
      const int c = place.first_column + threadIdx.x;
      if (threadIdx.x < kScaleBlock && c < params.k) {
        params.transposed_scale[static_cast<int64_t>(place.m_block) * params.k + c] = scale;
      }
    }
    store_columns<kIsAligned, true>(place.m_block * kScaleBlock);
  }

  // Stores the transposed tile: bytes tile_row.. of rows first_column.. of `transposed`.
  template <bool kIsAligned, bool kIsEmpty = false>
  __device__ __forceinline__ void store_columns(int tile_row) {
    constexpr int kRowsAtOnce = kNumThreads / 16;
    const int unit = threadIdx.x % 16;
    const int first_byte = tile_row + 8 * unit;
    const int num_columns = Config::kIsRagged ? params.num_columns : row_pitch(params.m);
    uint8_t* target = params.transposed + first_byte +
                      static_cast<int64_t>(place.first_column + threadIdx.x / 16) * num_columns;
#pragma unroll
    for (int i = 0; i < kScaleBlock / kRowsAtOnce; ++i) {
      const int c = threadIdx.x / 16 + i * kRowsAtOnce;
      uint2 bytes = {0, 0};
      if constexpr (!kIsEmpty) bytes = shared.transposed[c][unit ^ (c / 8)];
      const int count = place.first_column + c < params.k ? num_columns - first_byte : 0;
      store_8_bytes<kIsAligned>(target, bytes, count);
      target += static_cast<int64_t>(kRowsAtOnce) * num_columns;
    }
  }
};

}  // namespace jax_fp8gemm
