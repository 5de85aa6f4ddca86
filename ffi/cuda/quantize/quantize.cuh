// Quantisation to FP8 with 1x128 or 128x128 scale blocks. x (m, k) is in bf16, f16 or f32, or a
// source (quantize_source.cuh) computes it from what it reads.
//
//   scale = max(amax(block), 2^-92) / max_fp8, optionally rounded up to a power of two
//   value = fp8(x * (1 / scale)), to nearest even, saturated
// A block that holds an Inf or a NaN becomes NaN throughout, its scale too.
//
// Results, by mode; values and `transposed` are row-major:
//   row               values (m, k),      scale [k/128][m]: one per 1x128 block of x
//   column            transposed (k, m),  transposed_scale [m/128][k]: one per 128x1 block of x
//   row_column        all four, from one read of x
//   block             values (m, k),      scale [m/128][k/128]: one per 128x128 block
//   block_transposed  transposed (k, m),  transposed_scale [k/128][m/128]
//   block_both        values, transposed, scale [m/128][k/128]
//   row_block_transposed  the results of row, and those of block_transposed, from one read of x
//
// block, block_transposed and block_both take a batch of x too, (b, m, k), unless ragged; each
// result then has b in front.
//
// Work (quantize_walk.cuh): a warp takes 16 rows of one k-block. In mode "row" warps never meet, in
// every other mode the 8 warps of a CTA take a 128x128 tile. Several CTAs share an SM and cover
// each other's loads and barriers. A CTA takes one tile. If its source prefetches, it takes tile
// after tile: once a thread has read its part of shared memory, it starts to copy there what its
// next elements are made of. No other thread touches that part, so no barrier is needed. Where the
// source looks rows up by number, the part is a warp's.
//
// Paired: a CTA takes two tiles that are made of the same operands. k is a multiple of 256.
//
// Timeline of a tile with 1x128 blocks (each thread keeps its 8x8 elements in registers):
//   load; column maxima of the warp -> shared; row maxima by shuffles; store rows and their scales
//   barrier; a thread per column: maximum over 8 warps, scale -> global, factor -> shared
//   barrier; round by columns -> shared, transposed
//   barrier; store whole transposed rows
//
// Shared memory: the transposed tile is 128 rows (columns of x) of 16 units of 8 bytes (8 rows of
// x). Unit u of row c sits at u ^ (c / 8). Writing, 16 lanes hold the same u for columns 8 l + j,
// so c / 8 = l and the 16 units differ: 16 x 8 bytes cover the 32 banks once. Reading, 16 lanes
// take the 16 units of one row.
//
// Global stores fill sectors of 32 bytes: 16 lanes write 128 bytes of a row, and a warp writes the
// scales of 16 rows. Rows that are not a multiple of 8 long (16, if x is FP8) are read and
// written element by element.
//
// Padded: rows of values and of `transposed` end with zeros, at the next multiple of 128 (with NaN,
// where their block is NaN). So they are written by 8 bytes, and a product reads each 128 bytes of
// a row from one line of the L2.
//
// Ragged (modes that store `transposed`, but block_both): it has num_columns columns, and columns
// of no token are zero. Where rows are stored too, a CTA that takes rows of no group also stores a
// block of zeros. A source that leaves rows stores those of groups alone.
//
// Limits: 1 <= m, k <= 2^30. Sources: PTX ISA cvt, max, ld.global.nc; DeepSeek-V3 report, 3.3.
#pragma once

#include "quantize/quantize_tile.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct Quantizer : QuantizedTile<Config> {
  using Tile = QuantizedTile<Config>;
  using Tile::column, Tile::elements, Tile::params, Tile::place, Tile::row, Tile::warp;
  using Tile::kMode, Tile::kPrefetches, Tile::kScaleBlock, Tile::kStoresColumns, Tile::kStoresRows;
  using typename Tile::Source;
  using typename Tile::Walk;

  // kIsAligned: as in quantize_tile.cuh.
  template <bool kIsAligned>
  __device__ __forceinline__ void run() {
    constexpr bool kLooksUpRows = kIsAligned && Source::kLooksUpRows;
    const Walk walk = {params, warp, Walk::count_rows(params),
                       kLooksUpRows ? Walk::choose_log2_run(params) : 0};
    unsigned unit = blockIdx.x;
    if constexpr (Walk::kLeavesRows) {
      if (walk.find_from(unit, place)) run_units_of_groups<kIsAligned>(walk, unit);
      if constexpr (kStoresColumns) store_empty_columns<kIsAligned>();
    } else {
      place = walk.find(unit);
      if constexpr (!kPrefetches) {
        this->template fill<kIsAligned>();
        this->template quantize<kIsAligned>();
      } else if constexpr (kLooksUpRows) {
        run_looking_up(walk);
      } else {
        run_units<kIsAligned>(walk);
      }
    }
  }

  // Runs where results are padded: stores are always aligned, loads may not be.
  __device__ __forceinline__ void run_padded() {
    static_assert(!kPrefetches && !Walk::kLeavesRows, "only x itself has padded results");
    const Walk walk = {params, warp, Walk::count_rows(params), 0};
    place = walk.find(blockIdx.x);
    Source::is_aligned(params.k) ? this->template fill<true>() : this->template fill<false>();
    this->template quantize<true>();
  }

  // Runs where a unit is two tiles, which are made of the same operands. The elements of the second
  // one wait in shared memory, in the place of some operands.
  __device__ __forceinline__ void run_pairs() {
    const Walk walk = {params, warp, Walk::count_rows(params)};
    unsigned unit = blockIdx.x;
    bool has_unit = walk.find_from(unit, place);
    if (has_unit) {
      prefetch_pair(place, false);
      prefetch_pair(place, true);
    }
#pragma unroll 1
    while (has_unit) {
      Source::fill_first(elements, params, row(place), column(place), place.row_end);
      typename Walk::Place next = place;
      unit += gridDim.x;
      has_unit = walk.find_from(unit, next);
      if (has_unit) prefetch_pair(next, false);
      if constexpr (kMode != kRow) __syncthreads();  // the last tile's columns are stored
      this->template quantize<true>();
      Source::take_second(elements);
      if (has_unit) prefetch_pair(next, true);
      place.k_block += params.k / (2 * kScaleBlock);
      place.first_column += params.k / 2;
      if constexpr (kMode != kRow) __syncthreads();  // the first tile's columns are stored
      this->template quantize<true>();
      place = next;
    }
    if constexpr (Walk::kLeavesRows && kStoresColumns) store_empty_columns<true>();
  }

 private:
  template <bool kIsAligned>
  __device__ __forceinline__ void run_units(const Walk& walk) {
    const unsigned num_units = walk.count();
    prefetch<kIsAligned>(place);
#pragma unroll 1
    for (unsigned unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
      this->template fill<kIsAligned>();
      typename Walk::Place next = place;
      if (unit + gridDim.x < num_units) {
        next = walk.find(unit + gridDim.x);
        prefetch<kIsAligned>(next);
      }
      if constexpr (kMode != kRow) __syncthreads();  // the last tile's columns are stored
      this->template quantize<kIsAligned>();
      place = next;
    }
  }

  // The same of a source that leaves rows of no group. unit: the CTA's first.
  template <bool kIsAligned>
  __device__ __forceinline__ void run_units_of_groups(const Walk& walk, unsigned unit) {
    if constexpr (!kPrefetches) {
      this->template fill<kIsAligned>();
      this->template quantize<kIsAligned>();
      return;
    }
    bool has_unit = true;
    prefetch<kIsAligned>(place);
#pragma unroll 1
    while (has_unit) {
      this->template fill<kIsAligned>();
      typename Walk::Place next = place;
      unit += gridDim.x;
      has_unit = walk.find_from(unit, next);
      if (has_unit) prefetch<kIsAligned>(next);
      if constexpr (kMode != kRow) __syncthreads();  // the last tile's columns are stored
      this->template quantize<kIsAligned>();
      place = next;
    }
  }

  // Stores the columns behind those of all groups.
  template <bool kIsAligned>
  __device__ __forceinline__ void store_empty_columns() {
    const int num_k_blocks = ceil_div(params.k, kScaleBlock);
    const int first = Walk::count_blocks(params) * num_k_blocks;
    const int end = params.num_columns / kScaleBlock * num_k_blocks;
    for (int i = first + int(blockIdx.x); i < end; i += gridDim.x) {
      place.m_block = i / num_k_blocks;
      place.k_block = i % num_k_blocks;
      place.first_column = place.k_block * kScaleBlock;
      this->template store_empty_tile<kIsAligned>();
    }
  }

  // The aligned form of a source that looks rows up: numbers are loaded two tiles ahead, and what
  // they name one tile ahead.
  __device__ __forceinline__ void run_looking_up(const Walk& walk) {
    unsigned unit = blockIdx.x;
    int number = Source::load_number(params, place.first_row, place.row_end);
    typename Source::Factors factors = prefetch_rows(place, number);
    typename Walk::Place next = place;
    bool has_next = walk.advance(next, unit);
    if (has_next) number = Source::load_number(params, next.first_row, next.row_end);
    while (true) {
      const bool is_empty = has_no_rows(place);
      if (!is_empty) Source::take(elements, factors);
      typename Walk::Place after = next;
      bool has_after = false;
      if (has_next) {
        factors = prefetch_rows(next, number);
        has_after = walk.advance(after, unit);
        if (has_after) number = Source::load_number(params, after.first_row, after.row_end);
      }
      if (is_empty) {
        this->template store_empty_tile<true>();
      } else {
        if constexpr (kMode != kRow) __syncthreads();  // the last tile's columns are stored
        this->template quantize<true>();
      }
      if (!has_next) return;
      place = next;
      next = after;
      has_next = has_after;
    }
  }

  // Whether a tile is zeros of no token, and nothing else.
  static __device__ __forceinline__ bool has_no_rows(const typename Walk::Place& of) {
    return !kStoresRows && Config::kIsRagged && !of.is_of_group;
  }

  __device__ __forceinline__ auto prefetch_rows(const typename Walk::Place& next,
                                                int number) const {
    typename Source::Factors factors = {};
    if (!has_no_rows(next)) {
      factors = Source::prefetch(params, number, next.first_row, next.first_column, next.row_end);
    }
    return factors;
  }

  // is_late: what lies where the second tile waits, or the rest.
  __device__ __forceinline__ void prefetch_pair(const typename Walk::Place& next,
                                                bool is_late) const {
    Source::prefetch_pair(params, row(next), column(next), next.row_end, is_late);
  }

  template <bool kIsAligned>
  __device__ __forceinline__ void prefetch(const typename Walk::Place& next) const {
    if constexpr (kIsAligned) Source::prefetch(params, row(next), column(next), next.row_end);
  }
};

}  // namespace jax_fp8gemm

// The kernel. Its name is JAX_FP8GEMM_KERNEL, which differs for each config, so that profiles tell
// the configs apart.
extern "C" __global__ void __launch_bounds__(jax_fp8gemm::Quantizer<Config>::kNumThreads,
                                             jax_fp8gemm::Quantizer<Config>::kMinCtas)
    JAX_FP8GEMM_KERNEL(const __grid_constant__ jax_fp8gemm::QuantizeParams params) {
  using Quantizer = jax_fp8gemm::Quantizer<Config>;
  __shared__ typename Quantizer::SharedStorage shared;  // dropped by the compiler in mode "row"
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
  const jax_fp8gemm::QuantizeParams& element =
      jax_fp8gemm::batch_element<Quantizer>(params, blockIdx.y);
  Quantizer quantizer{{element, shared, lane, warp}};

  if constexpr (Config::kIsPadded) {
    quantizer.run_padded();
  } else if constexpr (Config::kIsPaired) {
    quantizer.run_pairs();
  } else {
    const bool is_aligned = Quantizer::Source::is_aligned(params.k) &&
                            (!Quantizer::kStoresColumns || Config::kIsRagged || params.m % 8 == 0);
    is_aligned ? quantizer.template run<true>() : quantizer.template run<false>();
  }
}
