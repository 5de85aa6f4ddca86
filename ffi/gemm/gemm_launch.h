// What dense and grouped products share: the kernel's parameters, its tensor maps and its launch.

#ifndef JAX_FP8GEMM_GEMM_GEMM_LAUNCH_H_
#define JAX_FP8GEMM_GEMM_GEMM_LAUNCH_H_

#include <cstddef>
#include <cstdint>

#include "buffers.h"
#include "driver/driver.h"
#include "gemm/gemm_config.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Mirrors GemmParams in cuda/gemm/tile.cuh.
struct GemmParams {
  CUtensorMap lhs, rhs, lhs_part, lhs_scale_map, rhs_scale_map, out_map;
  const void* lhs_scale;
  const void* rhs_scale;
  const void* accum;
  void* out;
  int32_t m, n, k;   // of one group; m of all where groups cut the rows
  int32_t lhs_rows;  // in memory
  int32_t raster;
  int32_t num_groups;
  int32_t rows_per_group;  // > 0: the masked form
  const int32_t* group_sizes;
  const int32_t* first_row;
  int32_t* next_tile;  // groups of rows: to be 0
  int32_t first_part;
  int32_t clears_rest;     // groups of rows: whether the kernel clears rows of no group
  void* out_scale;         // gated: of h
  const void* lhs_values;  // quantizes_lhs: bf16
  int32_t lhs_columns;
};
static_assert(alignof(GemmParams) == 64 && sizeof(GemmParams) == 896);
static_assert(offsetof(GemmParams, out_map) == 640 && offsetof(GemmParams, lhs_scale) == 768);
static_assert(offsetof(GemmParams, out) == 792 && offsetof(GemmParams, m) == 800);
static_assert(offsetof(GemmParams, raster) == 816 && offsetof(GemmParams, next_tile) == 848 &&
              offsetof(GemmParams, first_part) == 856 && offsetof(GemmParams, clears_rest) == 860 &&
              offsetof(GemmParams, out_scale) == 864 && offsetof(GemmParams, lhs_values) == 872);

// A row-major operand of FP8 values.
struct Operand {
  const void* data;
  int64_t rows, columns;
};

// Encodes the tensor maps of lhs, of rhs and of out (out_rows, n), or (out_rows, m) if out is
// transposed, and launches the kernel for at most `max_tiles` tiles. `params` has everything else.
// lhs and rhs have as many k-blocks as k. TMA reads zeros behind their columns. A kernel that
// quantises lhs has no map of it.
ffi::Error LaunchGemm(const GemmConfig& config, GemmParams params, const Operand& lhs,
                      const Operand& rhs, int64_t out_rows, int64_t max_tiles, CUstream stream);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_GEMM_GEMM_LAUNCH_H_
