// Which rows and columns the CTAs and warps of a quantiser take, and in which order.
//
// A warp takes 16 rows of one k-block. In mode "row" that is all, and four of them are a CTA; in
// every other mode the 8 warps of a CTA take a 128x128 tile. Paired, they take those of a k-block
// of the first half of the columns, then those of the k-block as far into the other half. CTAs take
// tiles in bands of 4 down the rows, or, where the source walks down, in runs of k-blocks down all
// rows.
//
// Ragged: the columns of `transposed` are tokens, and every group of them starts at a multiple of
// 128 (groups.cuh). A CTA takes the rows of one block of columns. Where rows are stored too, those
// of no group have CTAs of their own, behind the groups' last block. A source that leaves rows
// (quantize_source.cuh) skips what is of no group, and CTAs store its empty columns in the end. In
// mode "row" its units end with the last group.
#pragma once

#include "groups.cuh"
#include "quantize/quantize_params.cuh"
#include "quantize/quantize_source.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct QuantizeWalk {
  static constexpr bool kIsRow = Config::kMode == kRow;
  static constexpr int kScaleBlock = 128;
  static constexpr int kWarpRows = 2 * kFragmentRows;
  static constexpr int kNumWarps = kIsRow ? 4 : kScaleBlock / kWarpRows;
  // Tiles that follow each other down the rows of x before the next k-block: CTAs that run together
  // then read long pieces of a row of x and also write long pieces of a row of `transposed`.
  static constexpr int kRaster = 4;

  using Source = QuantizeSource<Config>;
  static constexpr bool kLeavesRows = Config::kIsRagged && Source::kLeavesRows;

  struct Place {
    int first_row, first_column;  // of the warp; its k-block
    int row_end;                  // rows from here on are not the CTA's, or not there
    int m_block, k_block;         // of the CTA's tile; mode "row": unset
    bool is_of_group;
  };

  const QuantizeParams& params;
  const int warp;
  const int num_rows;  // mode "row": of the units
  // Of a source that walks down: a unit is a run of 1, 2 or 4 k-blocks of the same rows.
  const int log2_run = 0;

  static __device__ __forceinline__ int count_rows(const QuantizeParams& params) {
    if constexpr (!kIsRow || !kLeavesRows) return params.m;
    return end_of_groups(params.group_sizes, *params.first_row, params.num_groups, params.m);
  }

  // Blocks of columns of all groups.
  static __device__ __forceinline__ int count_blocks(const QuantizeParams& params) {
    GroupScan scan = {start_of_groups(params), 0};
    for (int first = 0; first < params.num_groups; first += 32) {
      scan.next(params.group_sizes, first, params.num_groups, params.m, 0, kScaleBlock);
    }
    return scan.blocks_before;
  }

  // The longest run of which each CTA gets 8 or more.
  static __device__ __forceinline__ int choose_log2_run(const QuantizeParams& params) {
    if constexpr (kIsRow) return 0;
    const unsigned num_tiles = params.num_m_blocks * ceil_div(params.k, kScaleBlock);
    const unsigned tiles_of_cta = num_tiles / gridDim.x;
    return (tiles_of_cta >= 16) + (tiles_of_cta >= 32);
  }

  // The k-blocks that units are counted in. Paired: those of the first half of the columns.
  __device__ __forceinline__ int count_k_blocks() const {
    return ceil_div(params.k, Config::kIsPaired ? 2 * kScaleBlock : kScaleBlock);
  }

  // The number of units. A CTA takes one unit at a time.
  __device__ __forceinline__ int count() const {
    const int num_k_blocks = count_k_blocks();
    if constexpr (kIsRow) {
      return ceil_div(ceil_div(num_rows, kWarpRows) * num_k_blocks, kNumWarps);
    } else if constexpr (Source::kWalksDown) {
      return params.num_m_blocks * (((num_k_blocks - 1) >> log2_run) + 1);
    } else {
      return params.num_m_blocks * num_k_blocks;
    }
  }

  // Moves a place to the next k-block of its run, or to the CTA's next unit. Returns false if it
  // was the last.
  __device__ __forceinline__ bool advance(Place& place, unsigned& unit) const {
    const int k_block = place.k_block + 1;
    if ((k_block & ((1 << log2_run) - 1)) != 0 && k_block < ceil_div(params.k, kScaleBlock)) {
      place.k_block = k_block;
      place.first_column += kScaleBlock;
      return true;
    }
    unit += gridDim.x;
    if (unit >= count()) return false;
    place = find(unit);
    return true;
  }

  // Returns the part of a unit that this warp takes.
  __device__ __forceinline__ Place find(unsigned unit) const {
    const int num_k_blocks = count_k_blocks();
    if constexpr (kIsRow) {
      const int i = unit * kNumWarps + warp;
      const int k_block = Source::k_block(i % num_k_blocks, num_k_blocks);
      return {i / num_k_blocks * kWarpRows, k_block * kScaleBlock, num_rows};
    } else {
      int m_block, k_block;
      if constexpr (Source::kWalksDown) {
        m_block = unit % params.num_m_blocks;
        k_block = int(unit / params.num_m_blocks) << log2_run;
      } else {
        const int group_tiles = kRaster * num_k_blocks;
        const int group_start = unit / group_tiles * kRaster;
        const int group_rows = min(kRaster, params.num_m_blocks - group_start);
        m_block = group_start + unit % group_tiles % group_rows;
        k_block = Source::k_block(unit % group_tiles / group_rows, num_k_blocks);
      }
      Place place = {m_block * kScaleBlock + warp * kWarpRows,
                     k_block * kScaleBlock,
                     params.m,
                     m_block,
                     k_block,
                     true};
      if constexpr (Config::kIsRagged) find_rows(place);
      return place;
    }
  }

  // Moves `unit` to the next one, from it on, that is not skipped. Returns false if there is none.
  __device__ __forceinline__ bool find_from(unsigned& unit, Place& place) const {
    for (; unit < count(); unit += gridDim.x) {
      place = find(unit);
      if (kIsRow || place.is_of_group) return true;
    }
    return false;
  }

 private:
  static __device__ __forceinline__ unsigned start_of_groups(const QuantizeParams& params) {
    return min(max(__ldg(params.first_row), 0), params.m);
  }

  // Sets the rows of a block of columns, and whether they are of a group. Behind the groups come
  // the rows before the first one and after the last, then none.
  __device__ __forceinline__ void find_rows(Place& place) const {
    const int m_block = place.m_block;
    const unsigned m = params.m;
    const unsigned start = start_of_groups(params);
    GroupScan scan = {start, 0};
    for (int first = 0; first < params.num_groups; first += 32) {
      const int before = scan.blocks_before;
      scan.next(params.group_sizes, first, params.num_groups, m, 0, kScaleBlock);
      const unsigned found = __ballot_sync(0xffffffff, int(scan.blocks_end) > m_block);
      if (found == 0) continue;
      const int source = __ffs(found) - 1;
      const int previous = __shfl_sync(0xffffffff, int(scan.blocks_end), max(source - 1, 0));
      const int in_group = m_block - (source > 0 ? previous : before);
      place.first_row = int(__shfl_sync(0xffffffff, scan.begin, source)) + in_group * kScaleBlock +
                        warp * kWarpRows;
      place.row_end = int(__shfl_sync(0xffffffff, scan.end, source));
      return;
    }
    place.is_of_group = false;
    if constexpr (kLeavesRows) return;
    const int rest = m_block - int(scan.blocks_before);
    const int blocks_before_groups = ceil_div(start, kScaleBlock);
    const bool is_before = rest < blocks_before_groups;
    place.first_row =
        (is_before ? rest * kScaleBlock
                   : int(scan.rows_before) + (rest - blocks_before_groups) * kScaleBlock) +
        warp * kWarpRows;
    place.row_end = is_before ? int(start) : params.m;
    if constexpr (Config::kMode == kColumn || Config::kMode == kBlockTransposed) {
      place.row_end = 0;  // columns of no token: zeros
    }
  }
};

}  // namespace jax_fp8gemm
