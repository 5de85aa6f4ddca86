// What one consumer warpgroup does with a k-block: reads its scales, queues its batches on the
// tensor cores, promotes them, and gives the stage back. main_loop.cuh says in which order.
#pragma once

#include "gemm/pipeline.cuh"
#include "gemm/scales.cuh"
#include "gemm/tile.cuh"
#include "ptx/wgmma.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct Batches {
  using Tile = jax_fp8gemm::Tile<Config>;
  using SharedStorage = typename Tile::SharedStorage;

  static constexpr int kNumScales = Tile::kSplitSub ? 1 : Tile::kNumColumnBlocks;

  // What the batches of one k-block need from it besides the operands.
  struct KBlock {
    uint32_t stage;
    uint32_t scale_row;  // kReadsScalesLate: where this thread's scales are in the stage
    // The scales of this thread's two rows in each 64: rows 16 warp + lane / 4 and 8 further on. In
    // 1d2d they are multiplied by the scale of each column block, unless column blocks meet inside
    // a batch.
    float scale[kNumScales][Tile::kMSubs][2];
    float parts[Tile::kSplitSub ? Tile::kColumnScales : 1];  // then: those of the parts of the tile
  };

  const GemmParams& params;
  SharedStorage& shared;
  const int consumer, warp, lane;
  const int first_row;                // in the tile, of this thread
  const uint32_t lhs_tile, rhs_tile;  // descriptors of this consumer's operands in stage 0

  int num_k_blocks;    // of the tile
  uint32_t scale_row;  // of the next k-block: where this thread's scales are in their stage
  typename Tile::Ring ring;
  KBlock blocks[Tile::kGroup];
  uint32_t lhs_stage, rhs_stage;          // descriptors of the k-block that was read last
  float rhs_columns[Tile::kSubRegs / 2];  // 1d1d: scales of this thread's columns of one batch
  float part_scale[Tile::kNumParts][2];   // see scale_parts
  float accum[Config::kNumAccums][Tile::kSubRegs];
  float promoted[Tile::kMSubs][Config::kBlockN / 2];

  // NOTE: the shuffle of first_row keeps ptxas from computing it anew in every k-block.
  __device__ __forceinline__ Batches(const GemmParams& params, SharedStorage& shared, int consumer)
      : params(params),
        shared(shared),
        consumer(consumer),
        warp(thread_index() / 32 % 4),
        lane(thread_index() % 32),
        first_row(__shfl_sync(0xffffffff, consumer * Tile::kRows + warp * 16 + lane / 4, lane)),
        lhs_tile(wgmma_descriptor(shared.lhs) +
                 __shfl_sync(0xffffffff, consumer, 0) * (Tile::kRows * Tile::kScaleBlock / 16)),
        rhs_tile(wgmma_descriptor(shared.rhs)),
        num_k_blocks(ceil_div(params.k, 128)) {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mi = 0; mi < Tile::kMSubs; ++mi) {
#pragma unroll
      for (int i = 0; i < Config::kBlockN / 2; ++i) promoted[mi][i] = 0.f;
    }
  }

  // For the next k-block.
  __device__ __forceinline__ void wait() { mbarrier_wait(&shared.full[ring.stage], ring.phase); }
  __device__ __forceinline__ bool is_ready() {
    return mbarrier_test(&shared.full[ring.stage], ring.phase);
  }

  // Whether the next kCount k-blocks are there.
  template <int kCount>
  __device__ __forceinline__ bool are_ready() const {
    typename Tile::Ring next = ring;
    bool are = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      are &= mbarrier_test(&shared.full[next.stage], next.phase);
      next.advance();
    }
    return are;
  }

  // Waits for the next k-block, reads its scales and moves on.
  __device__ __forceinline__ void prepare(KBlock& block) {
    wait();
    enter(block);
    read_scales(block);
    advance();
  }

  // Moves on to the next k-block, whose row scales lie lhs_rows further on in memory. NOTE: their
  // position is pinned here, well before the scales are read, and in each lane: without that, 1d1d
  // took 6-12 % longer.
  __device__ __forceinline__ void advance() {
    ring.advance();
    scale_row = first_row + (scale_row - first_row + uint32_t(params.lhs_rows)) % 4;
    asm volatile("" : "+r"(scale_row));
  }

  // Points the descriptors at the k-block in the current stage.
  __device__ __forceinline__ void enter(KBlock& block) {
    block.stage = ring.stage;
    if constexpr (Tile::kReadsScalesLate) block.scale_row = scale_row;
    lhs_stage = lhs_tile + ring.stage * (Tile::kLhsBytes / 16);
    rhs_stage = rhs_tile + ring.stage * (Tile::kRhsBytes / 16);
  }

  // Reads the scales of a k-block. NOTE: the scales of parts are read here and not in scale_parts.
  // From there ptxas moves the load between two wgmma, where it waits for the pipe of shared
  // memory: 128x192/192 took 11 % longer.
  __device__ __forceinline__ void read_scales(KBlock& block) {
    const uint32_t row = Tile::kReadsScalesLate ? block.scale_row : scale_row;
    if constexpr (Tile::kReadsPartsByBatch) {
      read_parts(block, 0);
    } else if constexpr (Tile::kSplitSub) {
#pragma unroll
      for (int i = 0; i < Tile::kColumnScales; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&shared.rhs_scale[block.stage][i]);
        block.parts[i] = four.x, block.parts[i + 1] = four.y;
        block.parts[i + 2] = four.z, block.parts[i + 3] = four.w;
      }
    }
#pragma unroll
    for (int mi = 0; mi < Tile::kMSubs; ++mi) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float lhs_scale = shared.lhs_scale[block.stage][row + mi * 64 + half * 8];
#pragma unroll
        for (int i = 0; i < kNumScales; ++i) {
          block.scale[i][mi][half] = Config::kIs1d1d || Tile::kSplitSub
                                         ? lhs_scale
                                         : __fmul_rn(lhs_scale, shared.rhs_scale[block.stage][i]);
        }
      }
    }
  }

  // Reads the scales of the parts that the ni-th batch of columns lies under.
  __device__ __forceinline__ void read_parts(KBlock& block, int ni) {
    const int end = ceil_div((ni + 1) * Config::kSubN, Tile::kColumnStep);
#pragma unroll
    for (int i = first_part(ni); i < end; ++i) block.parts[i] = shared.rhs_scale[block.stage][i];
  }

  // Queues one batch on the tensor cores.
  __device__ __forceinline__ void issue(int batch) {
    const int sub = batch % Tile::kSubs;
    const uint32_t lhs = lhs_stage + sub % Tile::kMSubs * 512;
    const uint32_t rhs = rhs_stage + sub / Tile::kMSubs * (Config::kSubN * 8);
    multiply_k_block<Config::kSubN>(accum[batch % Config::kNumAccums], lhs, rhs);
  }

  // Promotes one finished batch; gives the stage back with the last one of a k-block.
  __device__ __forceinline__ void finish(int batch, int boundary) {
    if constexpr (!Tile::kReadColumnsEarly) read_columns(batch);
    if (batch % Tile::kSubs == Tile::kSubs - 1) release(blocks[batch / Tile::kSubs].stage);
    promote(batch, boundary);
  }

  // Scales one finished batch and adds it to the sums.
  __device__ __forceinline__ void promote(int batch, int boundary) {
    const int sub = batch % Tile::kSubs, mi = sub % Tile::kMSubs, ni = sub / Tile::kMSubs;
    float (&d)[Tile::kSubRegs] = accum[batch % Config::kNumAccums];
    float* sums = promoted[mi] + ni * Tile::kSubRegs;
    const KBlock& block = blocks[batch / Tile::kSubs];
    wgmma_pin(d);
    if constexpr (Config::kIs1d1d) {
      promote_1d1d(sums, d, block.scale[0][mi], rhs_columns);
    } else if constexpr (Tile::kSplitSub) {
      const int offset = ni * Config::kSubN - first_part(ni) * Tile::kColumnStep;
      promote_1d2d_parts<Tile::kColumnStep>(sums, d, part_scale, offset);
    } else {
      const bool is_latter = kNumScales > 1 && ni * Config::kSubN >= boundary;
      promote_1d2d(sums, d, block.scale[is_latter ? kNumScales - 1 : 0][mi]);
    }
  }

  // 1d1d: reads the scales of this thread's columns of a batch, unless the last batch had the same.
  __device__ __forceinline__ void read_columns(int batch) {
    const int sub = batch % Tile::kSubs, ni = sub / Tile::kMSubs;
    if (!Config::kIs1d1d || sub % Tile::kMSubs > 0) return;
    const float* scale = shared.rhs_scale[blocks[batch / Tile::kSubs].stage] + ni * Config::kSubN;
#pragma unroll
    for (int j = 0; j < Config::kSubN / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(&scale[8 * j + 2 * (lane % 4)]);
      rhs_columns[2 * j] = pair.x;
      rhs_columns[2 * j + 1] = pair.y;
    }
  }

  // 1d2d, where column blocks meet inside a batch: multiplies the scales of the thread's rows by
  // those of the parts of the tile that the batch lies under. NOTE: this is done, and pinned, while
  // the batch is multiplied. Scales selected after it took 250 cycles of a k-block of 144 columns,
  // in which the consumer had no batch on the tensor cores.
  __device__ __forceinline__ void scale_parts(int batch) {
    if constexpr (Tile::kSplitSub) {
      const int sub = batch % Tile::kSubs, mi = sub % Tile::kMSubs, ni = sub / Tile::kMSubs;
      KBlock& block = blocks[batch / Tile::kSubs];
      if (Tile::kReadsPartsByBatch && ni > 0) read_parts(block, ni);
      const int first = first_part(ni);
#pragma unroll
      for (int part = 0; part < Tile::kNumParts; ++part) {
        if ((first + part) * Tile::kColumnStep >= (ni + 1) * Config::kSubN) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          part_scale[part][half] = __fmul_rn(block.scale[0][mi][half], block.parts[first + part]);
          asm volatile("" : "+f"(part_scale[part][half]));
        }
      }
    }
  }

  // The part of the tile in which the ni-th batch of columns begins.
  __device__ __forceinline__ static constexpr int first_part(int ni) {
    return ni * Config::kSubN / Tile::kColumnStep;
  }

  // Tells the producer of every CTA that shares the stage that this warp is done with it.
  __device__ __forceinline__ void release(uint32_t stage) {
    Barrier* empty = &shared.empty[stage];
    __syncwarp();  // every lane has read its scales
    if constexpr (Config::kClusterSize == 1) {
      if (lane == 0) mbarrier_arrive(empty);
    } else {
      if (lane < Config::kClusterSize) mbarrier_arrive_remote(empty, lane);
    }
  }
};

}  // namespace jax_fp8gemm
