#include "gemm/gemm_launch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "driver/tensor_map.h"
#include "errors.h"
#include "jit/config_kernel.h"

namespace jax_fp8gemm {
namespace {

// Units (the tiles of one cluster) along m that follow each other before the next along n.
int64_t ChooseRaster(const GemmConfig& config, int64_t m, int64_t num_units_m,
                     int64_t num_units_n) {
  const int64_t unit_rows = int64_t{config.block_m} * config.cluster_m;
  const int64_t unit_columns = int64_t{config.block_n} * config.cluster_n;
  const int64_t num_clusters = config.num_sms / (config.cluster_m * config.cluster_n);
  // The units of one wave should cover a square: it reads least of lhs and rhs together.
  const double square = std::round(std::sqrt(double(num_clusters * unit_columns) / unit_rows));
  const double height = std::clamp<double>(square, 1, num_units_m);
  // Bands of that many units along m, or a little fewer so that all are about as high.
  int64_t raster = CeilDiv(num_units_m, CeilDiv(num_units_m, static_cast<int64_t>(height)));
  const bool is_last_row_short = m % unit_rows != 0 && num_units_m > 2;
  if (!is_last_row_short || num_units_m * num_units_n <= num_clusters) return raster;
  // A short last row of units takes less time. As a band of its own it comes last, and fills the
  // end of the last wave with small pieces; so the height of the other bands divides their rows,
  // where a divisor is near that of a square.
  const auto distance = [&](int64_t r) { return std::max(r / height, height / r); };
  const int64_t num_full_rows = num_units_m - 1;
  int64_t best = 1;
  for (int64_t d = 1; d * d <= num_full_rows; ++d) {
    if (num_full_rows % d != 0) continue;
    for (int64_t divisor : {d, num_full_rows / d}) {
      if (distance(divisor) < distance(best)) best = divisor;
    }
  }
  return distance(best) <= 1.5 ? best : raster;
}

// Tiles of the last, incomplete round that the kernel cuts into their consumers' parts.
int64_t CountCutTiles(const GemmConfig& config, int64_t num_tiles) {
  // Mirrors Tile::kCutsLast.
  const bool is_cut = config.is_1d1d && GroupingOf(config) == Grouping::kNone &&
                      config.num_consumers > 1 && config.cluster_m * config.cluster_n == 1;
  const int64_t rest = num_tiles % config.num_sms;
  return is_cut && rest * config.num_consumers <= config.num_sms ? rest : 0;
}

// Rows of the boxes by which the kernel loads less of lhs than a tile; 0 where it never does.
int64_t PartRows(const GemmConfig& config, int64_t m) {
  if (GroupingOf(config) == Grouping::kRows) return kPartRows;
  // Mirrors Tile::kLoadsShort.
  const bool loads_short = GroupingOf(config) == Grouping::kNone && !config.is_1d1d &&
                           !config.accumulate && !config.quantizes_lhs;
  return loads_short ? m % (config.block_m / config.cluster_n) : 0;
}

// Whether the kernel copies row scales by a tensor map; else it copies pieces. Mirrors
// has_scale_map.
bool HasScaleMap(uint64_t m) { return m % (m <= 128 ? 8 : 4) == 0; }

// The CTAs of a cluster load a part each of the tile that they share. Half of the rows of a gated
// tile are of gate, and half of up.
int64_t RhsBoxRows(const GemmConfig& config) {
  return config.block_n / config.cluster_m / (config.gated ? 2 : 1);
}

// How much the L2 fetches where it lacks a part of a box of operand x. NOTE: where rows end inside
// a line of the L2, the 128 bytes of a row of a box lie in two lines. Then products of more than 16
// rows are faster if lines are fetched one by one: 466x3680x8080 takes 0.90 of the time.
CUtensorMapL2promotion PromotionOf(const Operand& x, uint64_t m) {
  constexpr uint64_t kLineBytes = 128, kFewRows = 16;
  return x.columns % kLineBytes != 0 && m > kFewRows ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                     : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
}

// Encodes the maps that the kernel uses of this config and shape; the others stay zero.
ffi::Error EncodeTensorMaps(const Driver& driver, const GemmConfig& config, const Operand& lhs,
                            const Operand& rhs, uint64_t out_rows, GemmParams& params) {
  constexpr CUtensorMapSwizzle kSwizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const uint64_t m = lhs.rows, n = params.n;
  const auto encode = [&](const Operand& x, uint32_t box_rows) {
    return EncodeTensorMap2D(driver, CU_TENSOR_MAP_DATA_TYPE_UINT8, x.data, x.columns, x.rows,
                             x.columns, kScaleBlock, box_rows, kSwizzle, PromotionOf(x, m));
  };
  const uint64_t kb = CeilDiv(params.k, kScaleBlock);
  if (m * kb > INT32_MAX) {  // the kernel counts them in 32 bits
    return InvalidArgument("gemm: lhs must have less than 2^31 scales; got ", m, " rows of ", kb);
  }
  // The CTAs of a cluster load a part each of the tile that they share.
  if (!config.quantizes_lhs) {
    FFI_ASSIGN_OR_RETURN(params.lhs, encode(lhs, config.block_m / config.cluster_n));
  }
  FFI_ASSIGN_OR_RETURN(params.rhs, encode(rhs, RhsBoxRows(config)));
  if (const int64_t part_rows = PartRows(config, params.m); part_rows > 0) {
    FFI_ASSIGN_OR_RETURN(params.lhs_part, encode(lhs, part_rows));
  }
  if (HasScaleMap(m) && config.cluster_k == 1 && !config.quantizes_lhs) {
    // Groups of rows start anywhere, boxes at multiples of 16 bytes.
    const uint32_t num_row_scales =
        config.block_m + (GroupingOf(config) == Grouping::kRows ? 4 : 0);
    FFI_ASSIGN_OR_RETURN(
        params.lhs_scale_map,
        EncodeTensorMap2D(driver, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, params.lhs_scale, m, kb, 4 * m,
                          num_row_scales, 1, CU_TENSOR_MAP_SWIZZLE_NONE, kPromotion));
  }
  if (config.is_1d1d) {
    FFI_ASSIGN_OR_RETURN(
        params.rhs_scale_map,
        EncodeTensorMap2D(driver, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, params.rhs_scale, n, kb, 4 * n,
                          config.block_n, 1, CU_TENSOR_MAP_SWIZZLE_NONE, kPromotion));
  }
  if (NumSlabs(config) > 0 && !config.gated) {
    const auto type =
        config.out_f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const int64_t element_bytes = config.out_f32 ? 4 : 2, columns = SlabColumns(config);
    const auto swizzle = columns % 32 != 0                ? CU_TENSOR_MAP_SWIZZLE_NONE
                         : columns * element_bytes == 128 ? kSwizzle
                                                          : CU_TENSOR_MAP_SWIZZLE_64B;
    const int64_t row = config.transpose_out ? params.m : params.n;
    // f32 transposed: a slab of 64 rows and 32 columns is two boxes of 32 rows of out.
    const int64_t box_rows = config.transpose_out ? columns : kSlabRows;
    FFI_ASSIGN_OR_RETURN(params.out_map, EncodeTensorMap2D(driver, type, params.out, row, out_rows,
                                                           row * element_bytes, columns, box_rows,
                                                           swizzle, kPromotion));
  }
  return ffi::Error::Success();
}

// The clusters that run at a time, at most num_sms / cluster size. A GPC has places for whole
// clusters only: on an H100 of 132 multiprocessors 30 clusters of four ran at a time, and 32 did
// not. One more than fit would begin when others end, with as many tiles to compute as they had.
ffi::ErrorOr<int64_t> MostClusters(const Driver& driver, const GemmConfig& config, CUkernel kernel,
                                   const LaunchDims& dims) {
  const int64_t most = config.num_sms / dims.cluster_x;
  if (dims.cluster_x <= 2) return most;  // a GPC has pairs of multiprocessors
  struct Found {
    CUkernel kernel;
    CUdevice device;
    int num_clusters;
  };
  thread_local std::array<Found, 8> lately = {};
  thread_local size_t oldest = 0;
  FFI_ASSIGN_OR_RETURN(const CUdevice device, CurrentDevice(driver));
  for (const Found& found : lately) {
    if (found.kernel == kernel && found.device == device) {
      return std::min<int64_t>(most, found.num_clusters);
    }
  }
  FFI_ASSIGN_OR_RETURN(const int num_clusters, CountActiveClusters(driver, kernel, dims));
  lately[oldest] = {kernel, device, std::max(1, num_clusters)};
  oldest = (oldest + 1) % lately.size();
  return std::clamp<int64_t>(num_clusters, 1, most);
}

}  // namespace

ffi::Error LaunchGemm(const GemmConfig& config, GemmParams params, const Operand& lhs,
                      const Operand& rhs, int64_t out_rows, int64_t max_tiles, CUstream stream) {
  FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
  FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(config));
  FFI_RETURN_IF_ERROR(EncodeTensorMaps(*driver, config, lhs, rhs, out_rows, params));
  // The rows of one group, as if all groups were of the same size.
  const int64_t m =
      GroupingOf(config) == Grouping::kRows ? CeilDiv(params.m, params.num_groups) : params.m;
  params.raster = ChooseRaster(config, m, CeilDiv(m, int64_t{config.block_m} * config.cluster_m),
                               CeilDiv(params.n, int64_t{config.block_n} * config.cluster_n));
  const int64_t num_cut = CountCutTiles(config, max_tiles);
  params.first_part = static_cast<int32_t>(max_tiles - num_cut);
  const int64_t tiles_of_cluster = int64_t{config.cluster_m} * config.cluster_n;
  const int64_t cluster_size = tiles_of_cluster * config.cluster_k;
  const int64_t num_walked = params.first_part + num_cut * config.num_consumers;
  LaunchDims dims = {};
  dims.grid_x = cluster_size;
  dims.grid_y = 1;
  dims.block_x = NumThreads(config);
  dims.dynamic_smem_bytes = DynamicSmemBytes(config);
  dims.cluster_x = cluster_size;
  FFI_ASSIGN_OR_RETURN(const int64_t most_clusters, MostClusters(*driver, config, kernel, dims));
  dims.grid_x = std::min(most_clusters, CeilDiv(num_walked, tiles_of_cluster)) * cluster_size;
  void* arguments[] = {&params};
  return LaunchKernel(*driver, kernel, dims, stream, arguments);
}

}  // namespace jax_fp8gemm
