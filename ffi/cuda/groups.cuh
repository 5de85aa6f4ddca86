// Where the groups of a grouped product lie, from group_sizes on the device.
//
// What a size means is said in _groups.py: group i is the next group_sizes[i] rows, the first group
// starts at first_row; a negative size counts as 0 and rows past m as none. In the masked form
// (rows_per_group > 0) group i is the first group_sizes[i] of its own rows_per_group rows.
#pragma once

#include "ptx.cuh"

namespace jax_fp8gemm {

// Config::kGrouping: what the groups of a product cut, the rows of lhs and out or the contraction.
constexpr int kNoGroups = 0, kGroupedRows = 1, kGroupedContraction = 2;

// A value that all lanes share, in a way that the compiler knows: what it decides then keeps warps
// converged (REDUX writes a uniform register).
__device__ __forceinline__ int uniform(int value) {
  return int(__reduce_max_sync(0xffffffff, unsigned(value)));
}

struct Span {
  int row, row_end;
  int group;  // -1: rows of no group
};

// Spans of rows in the order of their tiles, one per group; then, in the ragged form, the rows
// before the first group and after the last, which belong to none. For a contraction over groups,
// the k-blocks of each.
struct GroupTable {
  static constexpr int kMaxGroups = 1024;
  int row[kMaxGroups + 2];
  int row_end[kMaxGroups + 2];
  int row_blocks_end[kMaxGroups + 2];  // inclusive prefix sum of ceil(rows / block)
  int num_spans, num_row_blocks, num_groups;

  __device__ __forceinline__ Span span(int i) const {
    return {row[i], row_end[i], i < num_groups ? i : -1};
  }

  // The first span, from `from` on, that ends behind this row block. By all lanes of a warp.
  __device__ __forceinline__ int find(int slot, int from) const {
    while (true) {
      const int i = from + int(threadIdx.x % 32);
      const bool is_behind = i < num_spans && row_blocks_end[i] > slot;
      const unsigned found = __ballot_sync(0xffffffff, is_behind);
      if (found != 0) return from + __ffs(found) - 1;
      from += 32;
    }
  }

  // Fills the table, by one warp. `block`: rows of a tile, or of a k-block; max_blocks: no group
  // reaches past that many.
  __device__ __forceinline__ void fill(const int* group_sizes, const int* first_row, int groups,
                                       int m, int rows_per_group, int block, unsigned max_blocks,
                                       bool with_rest) {
    const int lane = threadIdx.x % 32;
    const int limit = rows_per_group > 0 ? rows_per_group : m;
    const int start =
        rows_per_group > 0 ? 0 : min(max(first_row == nullptr ? 0 : *first_row, 0), m);
    unsigned rows_before = start, blocks_before = 0;
    for (int first = 0; first < groups; first += 32) {
      const int i = first + lane;
      const unsigned size = i < groups ? min(max(group_sizes[i], 0), limit) : 0;
      // Inclusive prefix sums over the lanes; sizes are clamped to m <= 2^30 at each step, so that
      // no sum overflows.
      unsigned end = size;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffff, end, distance);
        if (lane >= distance) end = min(end + other, unsigned(m));
      }
      const unsigned ragged_end = min(rows_before + end, unsigned(m));
      const unsigned before = __shfl_up_sync(0xffffffff, ragged_end, 1);
      const unsigned begin =
          rows_per_group > 0 ? unsigned(i) * rows_per_group : (lane > 0 ? before : rows_before);
      const unsigned finish = rows_per_group > 0 ? begin + size : ragged_end;
      unsigned blocks = (finish - begin + block - 1) / block;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffff, blocks, distance);
        if (lane >= distance) blocks += other;
      }
      if (i < groups) {
        row[i] = begin;
        row_end[i] = finish;
        row_blocks_end[i] = min(blocks_before + blocks, max_blocks);
      }
      rows_before = __shfl_sync(0xffffffff, ragged_end, 31);
      blocks_before += __shfl_sync(0xffffffff, blocks, 31);
    }
    if (lane == 0) {
      num_groups = num_spans = groups;
      if (with_rest) {
        row[groups] = 0, row_end[groups] = start;
        blocks_before += (start + block - 1) / block;
        row_blocks_end[groups] = blocks_before;
        row[groups + 1] = rows_before, row_end[groups + 1] = m;
        blocks_before += (m - rows_before + block - 1) / block;
        row_blocks_end[groups + 1] = blocks_before;
        num_spans = groups + 2;
      }
      num_row_blocks = blocks_before;
    }
  }
};

}  // namespace jax_fp8gemm
