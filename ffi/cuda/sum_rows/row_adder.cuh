// Adds numbered rows, with weights: for i < s
//
//   sums[i] = sum over j < c of weights[i][j] * rows[places[i][j]]
//
// A place that is no row adds zero. Each product is rounded to f32. The products of a sum are added
// in f32 in the order of j, and the last sum is rounded to the dtype of rows. Only rows that a
// place names are read.
//
// Layouts: rows (m, k) and sums (s, k) are row-major.
//
// Work: a warp takes a piece of 2048 bytes of a row of sums. Warps never meet. Neighbouring warps
// take neighbouring pieces, so that whole rows are read at about the same time.
//
// Timeline of a warp: a lane reads each place, and its weight. Then come the rows, two at a time:
// by 4 loads of 512 bytes each, and their additions. So a warp has 4 KiB in flight, and the 20
// warps of an SM 80 KiB. At 4.8 TB/s an SM moves 36 KiB in 1 us, about what a load takes.
//
// Words are of 16 bytes, or of an element where a row is no multiple of 16 bytes.
//
// Limits: s, m, k, c <= 2^30, less than 2^31 pieces. Sources: PTX ISA ld.global.nc.
#pragma once

#include "ptx/ptx.cuh"
#include "sum_rows/added_word.cuh"
#include "sum_rows/sum_rows_params.cuh"

namespace jax_fp8gemm {

template <typename Config>
struct RowAdder {
  using Word = AddedWord<Config::kInput, Config::kWordBytes>;
  static constexpr int kNumWarps = 4;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kMinCtas = 5;        // of an SM
  static constexpr int kPieceBytes = 2048;  // of a row of sums, for one warp

  static constexpr int kNumWords = 4;  // of a lane and a row, in flight at once
  static constexpr int kStepBytes = 32 * Config::kWordBytes;

  static_assert(kPieceBytes % (kNumWords * kStepBytes) == 0, "a piece is whole steps");

  const SumRowsParams& params;
  const int lane;

  // unit: the number of a piece, through all rows of sums.
  __device__ __forceinline__ void run(unsigned unit) const {
    const auto num_pieces = unsigned((row_bytes() + kPieceBytes - 1) / kPieceBytes);  // <= 2^21
    const unsigned row = unit / num_pieces;
    if (row >= unsigned(params.num_sums)) return;
    const int64_t first = int64_t(unit % num_pieces) * kPieceBytes;
    const int64_t end = min(first + kPieceBytes, row_bytes());
#pragma unroll 1
    for (int64_t step = first; step < end; step += kNumWords * kStepBytes) {
      add_step(row, step + lane * Config::kWordBytes);
    }
  }

 private:
  __device__ __forceinline__ int64_t row_bytes() const {
    return int64_t(params.k) * Word::kElementBytes;
  }

  // offset: of the lane's first word, in bytes of a row.
  __device__ __forceinline__ void add_step(int row, int64_t offset) const {
    // NOTE: -0 is what leaves all that is added to it as it is.
    float sums[kNumWords][Word::kElements];
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
#pragma unroll
      for (int e = 0; e < Word::kElements; ++e) sums[i][e] = -0.0f;
    }
    const int64_t first_place = int64_t(row) * params.num_places;
    bool adds_zero = params.num_places == 0;
    for (int first = 0; first < params.num_places; first += 32) {
      const bool has_place = first + lane < params.num_places;
      const int place = has_place ? __ldg(params.places + first_place + first + lane) : -1;
      const float weight = has_place ? __ldg(params.weights + first_place + first + lane) : 0.0f;
      const bool is_row = unsigned(place) < unsigned(params.m);
      adds_zero |= __any_sync(0xffffffff, has_place && !is_row);
      add_places(offset, place, weight, __ballot_sync(0xffffffff, is_row), sums);
    }
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
      if (adds_zero) {
#pragma unroll
        for (int e = 0; e < Word::kElements; ++e) sums[i][e] = __fadd_rn(sums[i][e], 0.0f);
      }
      Word word;
      word.set(sums[i]);
      const int64_t column = offset + i * kStepBytes;
      if (column < row_bytes()) word.store(params.sums + row * row_bytes() + column);
    }
  }

  // left: the lanes whose `place` is a row.
  __device__ __forceinline__ void add_places(int64_t offset, int place, float weight, unsigned left,
                                             float (&sums)[kNumWords][Word::kElements]) const {
#pragma unroll 1
    while (left != 0) {
      const int first = __ffs(left) - 1;
      left &= left - 1;
      const bool has_second = left != 0;
      const int second = has_second ? __ffs(left) - 1 : first;
      left &= left - 1;
      Word words[2][kNumWords];
      load(offset, __shfl_sync(0xffffffff, place, first), words[0]);
      if (has_second) load(offset, __shfl_sync(0xffffffff, place, second), words[1]);
      add(words[0], __shfl_sync(0xffffffff, weight, first), sums);
      if (has_second) add(words[1], __shfl_sync(0xffffffff, weight, second), sums);
    }
  }

  __device__ __forceinline__ void load(int64_t offset, int place, Word (&words)[kNumWords]) const {
    const uint8_t* source = params.rows + place * row_bytes() + offset;
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
      if (offset + i * kStepBytes < row_bytes()) words[i].load(source + i * kStepBytes);
    }
  }

  __device__ __forceinline__ static void add(const Word (&words)[kNumWords], float weight,
                                             float (&sums)[kNumWords][Word::kElements]) {
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
#pragma unroll
      for (int e = 0; e < Word::kElements; ++e) {
        sums[i][e] = __fadd_rn(sums[i][e], __fmul_rn(words[i].element(e), weight));
      }
    }
  }
};

}  // namespace jax_fp8gemm
