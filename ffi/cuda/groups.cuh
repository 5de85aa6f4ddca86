// Where the groups of a grouped product lie, from group_sizes on the device.
//
// What a size means is said in _data/groups.py: group i is the next group_sizes[i] rows, the first
// group starts at first_row; a negative size counts as 0 and rows past m as none. In the masked
// form (rows_per_group > 0) group i is the first group_sizes[i] of its own rows_per_group rows.
#pragma once

#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

// What the groups of a product cut: nothing, the rows of lhs and out, or the contraction. Mirrors
// Grouping in ffi/gemm/gemm_config.h.
enum class Grouping { kNone, kRows, kContraction };

template <typename Config>
constexpr Grouping grouping_of() {
  return static_cast<Grouping>(Config::kGrouping);
}

// A value that all lanes share, in a way that the compiler knows: what it decides then keeps warps
// converged (REDUX writes a uniform register).
__device__ __forceinline__ int uniform(int value) {
  return int(__reduce_max_sync(0xffffffff, unsigned(value)));
}

// 32 groups at a time, by one warp: lane l gets group first + l.
struct GroupScan {
  unsigned rows_before, blocks_before;  // before the next 32 groups

  unsigned begin, end;  // rows of this lane's group
  unsigned blocks_end;  // inclusive prefix sum of ceil(rows / block)

  // m: rows of all groups, <= 2^30; rows_per_group: 0 if the groups follow each other.
  __device__ __forceinline__ void next(const int* group_sizes, int first, int groups, unsigned m,
                                       unsigned rows_per_group, unsigned block) {
    const int lane = threadIdx.x % 32;
    const int i = first + lane;
    const int limit = rows_per_group > 0 ? rows_per_group : m;
    const unsigned size = i < groups ? min(max(__ldg(group_sizes + i), 0), limit) : 0;
    // Inclusive prefix sums over the lanes, clamped to m at each step so that none overflows.
    unsigned sum = size;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const unsigned other = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum = min(sum + other, m);
    }
    const unsigned ragged_end = min(rows_before + sum, m);
    const unsigned ragged_begin = __shfl_up_sync(0xffffffff, ragged_end, 1);
    begin = lane > 0 ? ragged_begin : rows_before;
    end = ragged_end;
    if (rows_per_group > 0) {
      begin = i * rows_per_group;
      end = begin + size;
    }
    blocks_end = (end - begin + block - 1) / block;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const unsigned other = __shfl_up_sync(0xffffffff, blocks_end, distance);
      if (lane >= distance) blocks_end += other;
    }
    blocks_end += blocks_before;
    rows_before = __shfl_sync(0xffffffff, ragged_end, 31);
    blocks_before = __shfl_sync(0xffffffff, blocks_end, 31);
  }
};

// Returns the row behind the last group, in all lanes of a warp. The groups follow each other.
__device__ __forceinline__ int end_of_groups(const int* group_sizes, int first_row, int groups,
                                             int m) {
  // Sums are clamped to m <= 2^30 at each step. That of two such numbers is 2^31 at most, so they
  // are unsigned.
  const unsigned most = m;
  unsigned rows = 0;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < groups; i += 32) {
    rows = min(rows + min(unsigned(max(__ldg(group_sizes + i), 0)), most), most);
  }
#pragma unroll
  for (int distance = 16; distance >= 1; distance /= 2) {
    rows = min(rows + __shfl_xor_sync(0xffffffff, rows, distance), most);
  }
  return int(min(min(unsigned(max(first_row, 0)), most) + rows, most));
}

struct Span {
  int row, row_end;
  int group;  // -1: rows of no group
};

// Spans of rows in the order of their tiles, one per group; then, if the table has the rest, the
// rows before the first group and after the last, which belong to none. For a contraction over
// groups, the k-blocks of each.
struct GroupTable {
  static constexpr int kMaxGroups = 1024;
  int row[kMaxGroups + 2];
  int row_end[kMaxGroups + 2];
  int row_blocks_end[kMaxGroups + 2];  // inclusive prefix sum of ceil(rows / block)
  int num_spans, num_row_blocks, num_groups;

  __device__ __forceinline__ Span span(int i) const {
    return {row[i], row_end[i], i < num_groups ? i : -1};
  }

  // The first span, from `from` on, that ends behind this row block; there is one.
  __device__ __forceinline__ int find(int slot, int from) const {
    int last = num_spans - 1;
    while (from < last) {
      const int middle = (from + last) / 2;
      if (row_blocks_end[middle] > slot) {
        last = middle;
      } else {
        from = middle + 1;
      }
    }
    return from;
  }

  // Fills the table, by one warp. `block`: rows of a tile, or of a k-block; max_blocks: no group
  // reaches past that many.
  __device__ __forceinline__ void fill(const int* group_sizes, const int* first_row, int groups,
                                       int m, int rows_per_group, int block, unsigned max_blocks,
                                       bool with_rest) {
    const int lane = threadIdx.x % 32;
    const int start =
        rows_per_group > 0 ? 0 : min(max(first_row == nullptr ? 0 : *first_row, 0), m);
    GroupScan scan = {unsigned(start), 0};
    for (int first = 0; first < groups; first += 32) {
      scan.next(group_sizes, first, groups, m, rows_per_group, block);
      if (first + lane < groups) {
        row[first + lane] = scan.begin;
        row_end[first + lane] = scan.end;
        row_blocks_end[first + lane] = min(scan.blocks_end, max_blocks);
      }
    }
    if (lane == 0) {
      num_groups = num_spans = groups;
      if (with_rest) {
        row[groups] = 0, row_end[groups] = start;
        scan.blocks_before += (start + block - 1) / block;
        row_blocks_end[groups] = scan.blocks_before;
        row[groups + 1] = scan.rows_before, row_end[groups + 1] = m;
        scan.blocks_before += (m - scan.rows_before + block - 1) / block;
        row_blocks_end[groups + 1] = scan.blocks_before;
        num_spans = groups + 2;
      }
      num_row_blocks = scan.blocks_before;
    }
  }
};

}  // namespace jax_fp8gemm
