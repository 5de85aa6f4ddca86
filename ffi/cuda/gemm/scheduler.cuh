// Which part of the output each persistent cluster computes next.
#pragma once

#include "gemm/tile.cuh"
#include "gemm/tile_walk.cuh"
#include "groups.cuh"
#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

// One tile of the output, and the operands it is computed from.
struct Work {
  int lhs_row, rhs_row;  // in the tensor maps
  int first_k_block, num_k_blocks;
  int rhs_scale_row;         // 1d2d: row of block scales, of the group's own column blocks
  int row, row_end, column;  // in out; rows from row_end on belong to others
  int first_out_row;         // kTransposesOut: of the group in out, whose rows are then columns
};

// Walks the tiles of one (m, n) output. Units of clusters are numbered so that `raster` of them
// along m are followed by the next ones along n: the units in flight at one time then cover a
// near-square part of the output, which is what keeps both operands in the L2.
__device__ __forceinline__ void locate_in_raster(int unit, int num_units_m, int num_units_n,
                                                 int raster, int& m_idx, int& n_idx) {
  const int band = unit / (raster * num_units_n);
  const int in_band = unit - band * raster * num_units_n;
  const int rows = min(raster, num_units_m - band * raster);
  n_idx = in_band / rows;
  m_idx = band * raster + in_band - n_idx * rows;
}

// Walks the tiles of a product without groups. If kCutsLast, those of the last, incomplete round
// are cut into the rows of their consumers where all of those find a CTA: from first_part on, a
// tile is one consumer's rows.
template <typename Config>
struct DenseScheduler : StaticWalk<Config> {
  using Tile = jax_fp8gemm::Tile<Config>;
  const GemmParams& params;

  template <typename SharedStorage>
  __device__ __forceinline__ DenseScheduler(const GemmParams& params, const SharedStorage&)
      : params(params) {}

  // The same for all CTAs of a cluster.
  __device__ __forceinline__ int count() const {
    const int num_units = ceil_div(params.m, Config::kBlockM * Config::kClusterM) *
                          ceil_div(params.n, Config::kBlockN * Config::kClusterN);
    if constexpr (!Tile::kCutsLast) return num_units;
    return params.first_part + (num_units - params.first_part) * Config::kNumConsumers;
  }

  __device__ __forceinline__ Work locate(int tile) const {
    const int part = Tile::kCutsLast ? max(tile - params.first_part, 0) : 0;
    const int unit = tile - part + part / Config::kNumConsumers;
    const int num_units_m = ceil_div(params.m, Config::kBlockM * Config::kClusterM);
    const int num_units_n = ceil_div(params.n, Config::kBlockN * Config::kClusterN);
    int m_idx = 0, n_idx = unit;
    // NOTE: products of few rows have one row of tiles. The divisions would take 0.2 us, 2-4 % of
    // their time.
    if (!Tile::kIsForFewRows || num_units_m > 1) {
      locate_in_raster(unit, num_units_m, num_units_n, params.raster, m_idx, n_idx);
    }
    const int rank = Config::kClusterSize > 1 ? cluster_rank() : 0;
    Work work;
    work.row = (m_idx * Config::kClusterM + (Config::kClusterM > 1 ? rank : 0)) * Config::kBlockM;
    work.column =
        (n_idx * Config::kClusterN + (Config::kClusterN > 1 ? rank : 0)) * Config::kBlockN;
    work.lhs_row = work.row;
    work.rhs_row = work.column;
    work.first_k_block = 0;
    work.num_k_blocks = ceil_div(params.k, 128);
    work.rhs_scale_row = work.column / 128;
    work.row_end = params.m;
    work.first_out_row = 0;
    if (Tile::kCutsLast && tile >= params.first_part) {
      work.lhs_row = work.row += part % Config::kNumConsumers * Tile::kRows;
      work.row_end = min(params.m, work.row + Tile::kRows);
    }
    return work;
  }
};

// Walks the tiles of every group of rows and then, if the table has them, those of the rows of no
// group, which are stored as zeros. A tile never spans two groups.
template <typename Config>
struct RaggedScheduler : DynamicWalk {
  const GemmParams& params;
  const GroupTable& table;
  int span = 0;  // where the search goes on: tiles only grow

  template <typename SharedStorage>
  __device__ __forceinline__ RaggedScheduler(const GemmParams& params, SharedStorage& shared)
      : DynamicWalk(shared.queue), params(params), table(shared.groups) {}

  __device__ __forceinline__ int take() const { return TileQueueCursor::take(params.next_tile); }
  __device__ __forceinline__ int hand_out(int taken) { return queue.hand_out(taken); }
  __device__ __forceinline__ int count() const {
    return table.num_row_blocks * ceil_div(params.n, Config::kBlockN);
  }

  __device__ __forceinline__ Work locate(int tile) {
    const int num_n = ceil_div(params.n, Config::kBlockN);
    span = table.find(tile / num_n, span);
    const Span s = table.span(span);
    const int first_block = span > 0 ? table.row_blocks_end[span - 1] : 0;
    int m_idx, n_idx;
    locate_in_raster(tile - first_block * num_n, table.row_blocks_end[span] - first_block, num_n,
                     params.raster, m_idx, n_idx);
    Work work;
    work.column = n_idx * Tile<Config>::kBoxColumns;
    work.row = work.lhs_row = s.row + m_idx * Config::kBlockM;
    work.row_end = s.row_end;
    work.rhs_row = s.group * params.n + work.column;
    work.rhs_scale_row = s.group * ceil_div(params.n, 128) + work.column / 128;
    work.first_k_block = 0;
    work.num_k_blocks = s.group >= 0 ? ceil_div(params.k, 128) : 0;
    return work;
  }
};

// Walks the tiles of the weight gradient of every group, whose contraction is over the group's own
// k-blocks.
template <typename Config>
struct RaggedContractionScheduler : StaticWalk<Config> {
  const GemmParams& params;
  const GroupTable& table;

  template <typename SharedStorage>
  __device__ __forceinline__ RaggedContractionScheduler(const GemmParams& params,
                                                        const SharedStorage& shared)
      : params(params), table(shared.groups) {}

  __device__ __forceinline__ int count() const { return params.num_groups * tiles_of_group(); }

  __device__ __forceinline__ Work locate(int tile) const {
    const int group = tile / tiles_of_group();
    int m_idx, n_idx;
    locate_in_raster(tile - group * tiles_of_group(), ceil_div(params.m, Config::kBlockM),
                     ceil_div(params.n, Config::kBlockN), params.raster, m_idx, n_idx);
    Work work;
    work.lhs_row = m_idx * Config::kBlockM;
    work.rhs_row = work.column = n_idx * Config::kBlockN;
    work.first_k_block = group > 0 ? table.row_blocks_end[group - 1] : 0;
    work.num_k_blocks = table.row_blocks_end[group] - work.first_k_block;
    if constexpr (Config::kTransposesOut) {
      work.row = work.lhs_row;
      work.row_end = params.m;
      work.first_out_row = group * params.n;
    } else {
      work.row = group * params.m + work.lhs_row;
      work.row_end = (group + 1) * params.m;
    }
    work.rhs_scale_row = work.column / 128;
    return work;
  }

 private:
  __device__ __forceinline__ int tiles_of_group() const {
    return ceil_div(params.m, Config::kBlockM) * ceil_div(params.n, Config::kBlockN);
  }
};

// Initialises the barriers of the queue, if there is one, by one thread.
template <typename Config, typename SharedStorage>
__device__ __forceinline__ void init_queue(SharedStorage& shared) {
  if constexpr (grouping_of<Config>() == Grouping::kRows) shared.queue.init(Config::kNumConsumers);
}

// Fills the group table that the schedulers read, by one warp.
template <typename Config, typename SharedStorage>
__device__ __forceinline__ void fill_groups(const GemmParams& params, SharedStorage& shared) {
  if constexpr (grouping_of<Config>() == Grouping::kRows) {
    const bool with_rest = params.clears_rest != 0 && params.rows_per_group == 0;
    shared.groups.fill(params.group_sizes, params.first_row, params.num_groups, params.lhs_rows,
                       params.rows_per_group, Config::kBlockM, 0xffffffff, with_rest);
  } else if constexpr (grouping_of<Config>() == Grouping::kContraction) {
    shared.groups.fill(params.group_sizes, nullptr, params.num_groups, params.k, 0, 128,
                       params.k / 128, false);
  }
}

template <typename Config, Grouping kGrouping>
struct SchedulerOf {
  using Type = DenseScheduler<Config>;
};
template <typename Config>
struct SchedulerOf<Config, Grouping::kRows> {
  using Type = RaggedScheduler<Config>;
};
template <typename Config>
struct SchedulerOf<Config, Grouping::kContraction> {
  using Type = RaggedContractionScheduler<Config>;
};

}  // namespace jax_fp8gemm
