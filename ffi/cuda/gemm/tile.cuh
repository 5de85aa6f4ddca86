// What follows from a config alone: sizes, the layout of a CTA's shared memory, and static
// assertions of what the kernel supports.
#pragma once

#include "gemm/pipeline.cuh"
#include "gemm/slabs.cuh"
#include "gemm/tile_queue.cuh"
#include "groups.cuh"
#include "ptx/mbarrier.cuh"

namespace jax_fp8gemm {

// Mirrors GemmParams in ffi/gemm/gemm_launch.h.
struct GemmParams {
  TensorMap lhs, rhs;
  // Groups of rows: boxes of kPartRows. kLoadsShort: of m % (kBlockM / kClusterN) rows.
  TensorMap lhs_part;
  TensorMap lhs_scale_map;  // where has_scale_map(lhs_rows)
  TensorMap rhs_scale_map;  // 1d1d
  TensorMap out_map;        // kNumSlabs > 0
  const float* lhs_scale;   // [k/128][m]
  const float* rhs_scale;   // 1d2d: [n/128][k/128]; 1d1d: [k/128][n]
  const float* accum;       // kAccumulate: what the product is added to; the same memory as out
  void* out;                // (m, n); kTransposesOut: (n, m); kIsGated: (m, n/2)
  int m, n, k;              // of one group; m of all where groups cut the rows
  int lhs_rows;             // in memory
  int raster;               // cluster tiles along m that follow each other, see locate_in_raster
  int num_groups;
  int rows_per_group;  // > 0: the masked form, see groups.cuh
  const int* group_sizes;
  const int* first_row;
  int* next_tile;          // groups of rows: 0, for TileQueue
  int first_part;          // Tile::kCutsLast: see DenseScheduler
  int clears_rest;         // groups of rows: whether the kernel clears rows of no group
  float* out_scale;        // kIsGated: [n/256][m]
  const void* lhs_values;  // kQuantizesLhs: bf16, rows of lhs_columns
  int lhs_columns;
};

struct Empty {};
template <bool kCondition, typename Then, typename Else>
struct Conditional {
  using Type = Then;
};
template <typename Then, typename Else>
struct Conditional<false, Then, Else> {
  using Type = Else;
};

__device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

template <typename Config>
struct Tile {
  using Ring = RingCursor<Config::kNumStages>;
  static constexpr int kScaleBlock = 128;
  static constexpr int kQuantizerWarpgroups = Config::kQuantizesLhs ? 2 : 0;
  static constexpr int kNumThreads = 128 * (Config::kNumConsumers + 1 + kQuantizerWarpgroups);
  static constexpr int kRows =
      Config::kBlockM / Config::kNumConsumers < 64 ? 64 : Config::kBlockM / Config::kNumConsumers;
  static constexpr int kMSubs = kRows / 64;
  static constexpr int kSubs =
      kMSubs * (Config::kBlockN / Config::kSubN);  // batches of one k-block
  static constexpr int kSubRegs = Config::kSubN / 2;
  static constexpr int kAhead = Config::kNumAccums - 1;
  // k-blocks of one loop trip: as few as make its batches a multiple of the accumulators.
  static constexpr int kGroup = kSubs % Config::kNumAccums == 0 ? 1 : Config::kNumAccums;
  // In 1d1d, whether the registers have room for the column scales of what is being multiplied, of
  // one k-block and of one batch's columns; they are then read under the multiplication, not after
  // it.
  static constexpr bool kReadColumnsEarly =
      Config::kIs1d1d && Config::kNumConsumers < 3 &&
      (Config::kNumAccums == 1 || (kGroup == 1 && Config::kSubN == Config::kBlockN)) &&
      kMSubs * Config::kBlockN / 2 + Config::kNumAccums * kSubRegs + kSubRegs / 2 <= 216;
  static constexpr int kBatches = kGroup * kSubs;
  // Whether tiles of the last round are cut. In 1d2d this gained nothing, in 1d1d up to 2 %.
  static constexpr bool kCutsLast = Config::kIs1d1d && grouping_of<Config>() == Grouping::kNone &&
                                    Config::kNumConsumers > 1 && Config::kClusterSize == 1;
  // Groups of rows: whether short tiles exchange their operands (exchanged_tile.cuh).
  static constexpr bool kExchanges = grouping_of<Config>() == Grouping::kRows &&
                                     Config::kNumConsumers == 2 && Config::kNumAccums == 1 &&
                                     Config::kBlockM == 128 && Config::kBlockN == 256 &&
                                     !Config::kIsGated;
  // 1d2d, without groups and without sums that are added to.
  static constexpr bool kIsPlain =
      grouping_of<Config>() == Grouping::kNone && !Config::kIs1d1d && !Config::kAccumulate;
  // Whether the last tiles along m are loaded without the rows that lhs does not have. NOTE: a row
  // that TMA fills with zeros costs the whole device more than one that it loads.
  static constexpr bool kLoadsShort = kIsPlain && !Config::kQuantizesLhs;
  // Whether products of few rows may get such tiles.
  static constexpr bool kIsForFewRows =
      !Config::kIs1d1d && Config::kBlockM <= 128 && Config::kBlockN <= 128;
  // Tiles of one consumer have little to multiply in a k-block. How long one takes is decided by
  // the lane that starts its copies, and by what the consumer does between two wgmma. So two lanes
  // start the copies of every second k-block each, and the consumer reads scales, and tests the
  // next barriers, while all batches of a loop trip are queued. NOTE: clusters of wider tiles, and
  // those along m, take 1 to 3 % longer so.
  static constexpr bool kIsShallow =
      kIsPlain && Config::kNumConsumers == 1 &&
      (Config::kClusterSize == 1 || (Config::kClusterN > 1 && Config::kBlockN <= 64));
  // NOTE: parity tells only two phases of a barrier apart. A lane waits for a stage that the other
  // one may have used last. It has then waited, up to 3 k-blocks before, for a stage that consumers
  // gave back later than that one. So there must be at least 3 stages.
  static constexpr int kNumLoaders = kIsShallow && Config::kNumStages > 2 ? 2 : 1;
  static constexpr bool kReadsScalesLate = kIsShallow && Config::kNumAccums > 1;
  // Boxes in which a tile of rhs is loaded. Gated, half of its columns are of gate, and the others,
  // n / 2 further on, of up (gated_epilogue.cuh).
  static constexpr int kRhsBoxes = Config::kIsGated ? 2 : 1;
  static constexpr int kBoxColumns = Config::kBlockN / kRhsBoxes;
  static constexpr int kPartRows = 32;  // of which a group's last tile loads as many as it needs
  static constexpr int kLhsBytes = Config::kBlockM * kScaleBlock;
  static constexpr int kRhsBytes = Config::kBlockN * kScaleBlock;
  // By TMA, whose boxes start at multiples of 16 bytes; groups of rows start anywhere.
  static constexpr int kLhsScaleBytes =
      (Config::kBlockM + (grouping_of<Config>() == Grouping::kRows ? 4 : 0)) * 4;
  // Row scales of a stage in shared memory: with room for RowScales::kMostWindow.
  static constexpr int kRowScales = Config::kBlockM + 32;
  static constexpr int kRhsScaleBytes = Config::kIs1d1d ? Config::kBlockN * 4 : 0;
  static constexpr int kSlabRowBytes = 128;  // but in slabs of all columns of a tile
  static constexpr int kSlabBytes = slab_bytes(Config::kBlockN);
  // The most 128-column blocks that a tile can lie under: at worst it starts kColumnStep before the
  // end of one. And whether one wgmma can lie under two.
  static constexpr int kColumnStep = gcd(Config::kBlockN, 128);
  static constexpr int kNumColumnBlocks =
      Config::kIs1d1d ? 1 : ceil_div(128 - kColumnStep + Config::kBlockN, 128);
  static constexpr bool kSplitSub =
      kNumColumnBlocks > 2 || (kNumColumnBlocks > 1 && 128 % Config::kSubN != 0);
  // Then the tile is cut into parts of kColumnStep columns, each under one block and with a scale
  // in the stage. This many of them meet in a wgmma, at most.
  static constexpr int kNumParts =
      kSplitSub
          ? ceil_div(kColumnStep - gcd(Config::kSubN, kColumnStep) + Config::kSubN, kColumnStep)
          : 1;
  // Whether sums and accumulators leave registers for the scales of one batch's parts alone.
  static constexpr bool kReadsPartsByBatch =
      kSplitSub && kMSubs * Config::kBlockN / 2 + Config::kNumAccums * kSubRegs >= 208;
  // Scales of rhs in a stage. Mirrors NumColumnScales.
  static constexpr int kColumnScales = Config::kIs1d1d ? ceil_div(Config::kBlockN, 32) * 32
                                       : kSplitSub ? ceil_div(Config::kBlockN / kColumnStep, 4) * 4
                                                   : 2;

  struct alignas(1024) SharedStorage {
    uint8_t lhs[Config::kNumStages][kLhsBytes];
    uint8_t rhs[Config::kNumStages][kRhsBytes];
    uint8_t slabs[Config::kNumConsumers]
                 [Config::kNumSlabs > 0 ? Config::kNumSlabs * kSlabBytes : 16];
    alignas(128) float lhs_scale[Config::kNumStages][kRowScales];
    alignas(128) float rhs_scale[Config::kNumStages][kColumnScales];
    alignas(8) Barrier full[Config::kNumStages];
    alignas(8) Barrier empty[Config::kNumStages];
    typename Conditional<grouping_of<Config>() == Grouping::kRows, TileQueue, Empty>::Type queue;
    typename Conditional<grouping_of<Config>() == Grouping::kNone, Empty, GroupTable>::Type groups;
  };

  static_assert(kRows % 64 == 0, "a consumer's rows must be whole wgmma tiles of 64");
  static_assert(Config::kBlockN % Config::kSubN == 0, "kSubN must tile kBlockN");
  static_assert(kBatches % Config::kNumAccums == 0,
                "accumulators must rotate evenly over a loop trip");
  static_assert(Config::kClusterM == 1 || Config::kClusterN == 1, "clusters are one-dimensional");
  static_assert(sizeof(SharedStorage) <= JAX_FP8GEMM_SMEM_BYTES,
                "the launch must ask for at least the shared memory that the kernel lays out");
};

}  // namespace jax_fp8gemm
