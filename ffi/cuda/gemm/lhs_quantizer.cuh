// The last two warpgroups where lhs is bf16: they quantise its rows, and store values and scales
// into the stages, in the place of the copies of them. The bits are those of the quantiser of rows.
#pragma once

#include "gemm/pipeline.cuh"
#include "gemm/scheduler.cuh"
#include "gemm/tile.cuh"
#include "quantize/quantize_fragment.cuh"
#include "quantize/quantize_scale.cuh"

namespace jax_fp8gemm {

// Each of the eight warps takes every eighth k-block. Eight lanes hold the 128 values of a row, so
// a warp has four rows in a pass. NOTE: a load of lhs waits behind all that TMA brings for several
// stages. So values of later k-blocks must be on their way: with two k-blocks for each of four
// warps, 8x4096x14336 took 34.7 us, and 23.2 with three for each of eight.
template <typename Config, typename Scheduler>
struct LhsQuantizer {
  using Tile = jax_fp8gemm::Tile<Config>;
  using Ring = typename Tile::Ring;
  static constexpr int kNumWarps = 4 * Tile::kQuantizerWarpgroups;
  static constexpr int kLaneValues = 16;
  struct Format {
    static constexpr bool kE5M2 = Config::kLhsE5M2, kPow2Scale = false;
  };

  // The values of a lane in a k-block, of kPasses rows.
  template <int kPasses>
  struct Values {
    uint32_t words[kPasses][2][4];
  };

  const GemmParams& params;
  typename Tile::SharedStorage& shared;
  const int warp, lane;

  __device__ __forceinline__ LhsQuantizer(const GemmParams& params,
                                          typename Tile::SharedStorage& shared)
      : params(params),
        shared(shared),
        warp(thread_index() / 32 - 4 * (Config::kNumConsumers + 1)),
        lane(thread_index() % 32) {}

  __device__ __forceinline__ void run() const {
    params.m <= 4 ? run_in_passes<1, 5>() : run_in_passes<2, 3>();
  }

 private:
  // kAhead: k-blocks whose values are on their way. NOTE: parity tells only two phases of a barrier
  // apart. A warp waits for a stage, and waited before, eight k-blocks ago, for consumers to give
  // back another one. So there must be at least eight stages, and the count goes on from tile to
  // tile. With seven, kernels ended in a launch failure.
  template <int kPasses, int kAhead>
  __device__ __forceinline__ void run_in_passes() const {
    static_assert(Config::kNumStages >= kNumWarps, "the parity of a stage must be known");
    const int num_k_blocks = ceil_div(params.k, Tile::kScaleBlock);
    Scheduler scheduler(params, shared);
    Ring ring;  // at the next k-block of this warp
    ring.skip(warp);
    int next = warp;  // the same in the tile
    Values<kPasses> values[kAhead];
    for (; scheduler.tile < scheduler.count(); scheduler.next()) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(values[i], next + i * kNumWarps);
#pragma unroll 1
      for (; next < num_k_blocks; next += kNumWarps * kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int k_block = next + i * kNumWarps;
          if (k_block < num_k_blocks) {
            store(values[i], ring);
            ring.skip(kNumWarps);
          }
          load(values[i], k_block + kNumWarps * kAhead);
        }
      }
      next = (next - num_k_blocks) % kNumWarps;
    }
  }

  __device__ __forceinline__ int row(int pass) const { return pass * 4 + lane / 8; }

  // Loads the values of a k-block; zeros where lhs has none.
  template <int kPasses>
  __device__ __forceinline__ void load(Values<kPasses>& values, int k_block) const {
    const int column = k_block * Tile::kScaleBlock + lane % 8 * kLaneValues;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint8_t* source = static_cast<const uint8_t*>(params.lhs_values) +
                              (int64_t(row(pass)) * params.lhs_columns + column) * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t (&words)[4] = values.words[pass][half];
        words[0] = words[1] = words[2] = words[3] = 0;
        if (row(pass) < params.m && column + half * 8 < params.lhs_columns) {
          load_16_bytes(words, source + half * 16);
        }
      }
    }
  }

  // Quantises the values of a k-block, and stores them and the scales of the rows in its stage.
  template <int kPasses>
  __device__ __forceinline__ void store(const Values<kPasses>& values, const Ring& at) const {
    BlockScale block[kPasses];
    scale_rows(values, block);
    mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      uint2 bytes[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t word = values.words[pass][half][j / 2];
          x[j] = mul_rn(__uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000),
                        block[pass].factor);
        }
        bytes[half] = round_fp8x8<Format::kE5M2>(x);
      }
      // The 128-byte swizzle: chunk c of 16 bytes of row r lies at c ^ r % 8.
      uint8_t* target = shared.lhs[at.stage] + row(pass) * Tile::kScaleBlock +
                        ((lane ^ row(pass)) % 8) * kLaneValues;
      *reinterpret_cast<uint4*>(target) = {bytes[0].x, bytes[0].y, bytes[1].x, bytes[1].y};
      if (lane % 8 == 0) shared.lhs_scale[at.stage][row(pass)] = block[pass].scale;
    }
    fence_proxy_async_shared();  // wgmma reads what was stored
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.full[at.stage]);
  }

  // Computes the scales of the rows, in all of their lanes.
  template <int kPasses>
  __device__ __forceinline__ static void scale_rows(const Values<kPasses>& values,
                                                    BlockScale (&block)[kPasses]) {
    uint32_t amax[kPasses];  // of two values each
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      amax[pass] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        amax[pass] = max_u16x2(amax[pass], values.words[pass][i / 4][i % 4] & 0x7fff7fff);
      }
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        amax[pass] = max_u16x2(amax[pass], __shfl_xor_sync(0xffffffff, amax[pass], step));
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      block[pass] = block_scale<Format>(max_u32(amax[pass] << 16, amax[pass] & 0xffff0000));
    }
  }
};

}  // namespace jax_fp8gemm
