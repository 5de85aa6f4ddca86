#include "gemm.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "driver.h"
#include "errors.h"
#include "gemm_config.h"
#include "jit.h"
#include "tensor_map.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_fp8gemm::GemmConfig, ::xla::ffi::StructMember<int32_t>("block_m"),
    ::xla::ffi::StructMember<int32_t>("block_n"), ::xla::ffi::StructMember<int32_t>("sub_n"),
    ::xla::ffi::StructMember<int32_t>("num_consumers"),
    ::xla::ffi::StructMember<int32_t>("num_accums"),
    ::xla::ffi::StructMember<int32_t>("num_stages"), ::xla::ffi::StructMember<int32_t>("num_slabs"),
    ::xla::ffi::StructMember<int32_t>("cluster_m"), ::xla::ffi::StructMember<int32_t>("cluster_n"),
    ::xla::ffi::StructMember<int32_t>("is_1d1d"), ::xla::ffi::StructMember<int32_t>("out_f32"),
    ::xla::ffi::StructMember<int32_t>("accumulate"), ::xla::ffi::StructMember<int32_t>("lhs_e5m2"),
    ::xla::ffi::StructMember<int32_t>("rhs_e5m2"), ::xla::ffi::StructMember<int32_t>("num_sms"));

namespace jax_fp8gemm {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 30;  // the kernel adds to row and column indices in int32

// Mirrors GemmParams in cuda/tile.cuh.
struct GemmParams {
  CUtensorMap lhs, rhs, lhs_scale_map, rhs_scale_map, out_map;
  const void* lhs_scale;
  const void* rhs_scale;
  const void* accum;
  void* out;
  int32_t m, n, k;
  int32_t raster;
};
static_assert(alignof(GemmParams) == 64 && sizeof(GemmParams) == 704);
static_assert(offsetof(GemmParams, out_map) == 512 && offsetof(GemmParams, lhs_scale) == 640);
static_assert(offsetof(GemmParams, out) == 664 && offsetof(GemmParams, m) == 672);
static_assert(offsetof(GemmParams, raster) == 684);

bool IsBuffer(const ffi::AnyBuffer& buffer, ffi::DataType type) {
  return buffer.element_type() == type && buffer.dimensions().size() == 2 &&
         reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16 == 0;
}

ffi::Error CheckValues(const GemmConfig& config, const ffi::AnyBuffer& lhs,
                       const ffi::AnyBuffer& rhs) {
  const auto fp8 = [](bool is_e5m2) {
    return is_e5m2 ? ffi::DataType::F8E5M2 : ffi::DataType::F8E4M3FN;
  };
  if (!IsBuffer(lhs, fp8(config.lhs_e5m2)) || !IsBuffer(rhs, fp8(config.rhs_e5m2)) ||
      lhs.dimensions()[1] != rhs.dimensions()[1]) {
    return InvalidArgument("gemm: lhs must be ", ShortType(fp8(config.lhs_e5m2)), "[m,k] and rhs ",
                           ShortType(fp8(config.rhs_e5m2)), "[n,k] at multiples of 16 bytes; got ",
                           "lhs ", ShapeText(lhs), " at ", lhs.untyped_data(), ", rhs ",
                           ShapeText(rhs), " at ", rhs.untyped_data());
  }
  const int64_t m = lhs.dimensions()[0], n = rhs.dimensions()[0], k = lhs.dimensions()[1];
  const bool is_in_range = 1 <= std::min({m, n, k}) && std::max({m, n, k}) <= kMaxDim;
  const int64_t num_tiles =
      is_in_range ? CeilDiv(m, config.block_m) * CeilDiv(n, config.block_n) : 0;
  if (!is_in_range || k % 16 != 0 || n % 8 != 0 || num_tiles > kMaxDim) {
    return InvalidArgument("gemm: m, n and k must be in 1..2^30, k a multiple of 16, n of 8, and ",
                           "tiles of out at most 2^30; got lhs ", ShapeText(lhs), ", rhs ",
                           ShapeText(rhs), ". Pad lhs and rhs with zeros.");
  }
  return ffi::Error::Success();
}

ffi::Error CheckBuffer(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                       int64_t rows, int64_t columns) {
  const auto dims = buffer.dimensions();
  if (IsBuffer(buffer, type) && dims[0] == rows && dims[1] == columns) {
    return ffi::Error::Success();
  }
  return InvalidArgument("gemm: ", name, " must be ", ShortType(type), "[", rows, ",", columns,
                         "] at a multiple of 16 bytes; got ", ShapeText(buffer), " at ",
                         buffer.untyped_data());
}

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
  // end of the last wave with small pieces; so the height of the other bands divides their rows.
  const auto distance = [&](int64_t r) { return std::max(r / height, height / r); };
  const int64_t num_full_rows = num_units_m - 1;
  raster = 1;
  for (int64_t d = 1; d * d <= num_full_rows; ++d) {
    if (num_full_rows % d != 0) continue;
    for (int64_t divisor : {d, num_full_rows / d}) {
      if (distance(divisor) < distance(raster)) raster = divisor;
    }
  }
  return raster;
}

// Encodes the maps that the kernel uses of this config and shape; the others stay zero.
ffi::Error EncodeTensorMaps(const Driver& driver, const GemmConfig& config, const void* lhs,
                            const void* rhs, GemmParams& params) {
  constexpr CUtensorMapSwizzle kNoSwizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  constexpr CUtensorMapSwizzle kSwizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  const uint64_t m = params.m, n = params.n, k = params.k, kb = CeilDiv(params.k, kScaleBlock);
  // The CTAs of a cluster load a part each of the tile that they share.
  FFI_ASSIGN_OR_RETURN(params.lhs,
                       EncodeTensorMap2D(driver, CU_TENSOR_MAP_DATA_TYPE_UINT8, lhs, k, m, k,
                                         kScaleBlock, config.block_m / config.cluster_n, kSwizzle));
  FFI_ASSIGN_OR_RETURN(params.rhs,
                       EncodeTensorMap2D(driver, CU_TENSOR_MAP_DATA_TYPE_UINT8, rhs, k, n, k,
                                         kScaleBlock, config.block_n / config.cluster_m, kSwizzle));
  if (m % 4 == 0) {  // else its stride is no multiple of 16 bytes, and the kernel copies the scales
    FFI_ASSIGN_OR_RETURN(
        params.lhs_scale_map,
        EncodeTensorMap2D(driver, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, params.lhs_scale, m, kb, 4 * m,
                          config.block_m, 1, kNoSwizzle));
  }
  if (config.is_1d1d) {
    FFI_ASSIGN_OR_RETURN(
        params.rhs_scale_map,
        EncodeTensorMap2D(driver, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, params.rhs_scale, n, kb, 4 * n,
                          config.block_n, 1, kNoSwizzle));
  }
  if (config.num_slabs > 0) {
    const auto type =
        config.out_f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const uint32_t element_bytes = config.out_f32 ? 4 : 2;
    FFI_ASSIGN_OR_RETURN(params.out_map,
                         EncodeTensorMap2D(driver, type, params.out, n, m, n * element_bytes,
                                           kSlabRowBytes / element_bytes, kSlabRows, kSwizzle));
  }
  return ffi::Error::Success();
}

// The kernel's parameters but for the tensor maps, after a check of every buffer.
ffi::ErrorOr<GemmParams> BindParams(const GemmConfig& config, const ffi::AnyBuffer& lhs,
                                    const ffi::AnyBuffer& lhs_scale, const ffi::AnyBuffer& rhs,
                                    const ffi::AnyBuffer& rhs_scale,
                                    const ffi::RemainingArgs& accum, const ffi::AnyBuffer& out) {
  FFI_RETURN_IF_ERROR(CheckValues(config, lhs, rhs));
  const int64_t m = lhs.dimensions()[0], n = rhs.dimensions()[0], k = lhs.dimensions()[1];
  const int64_t kb = CeilDiv(k, kScaleBlock), nb = CeilDiv(n, kScaleBlock);
  constexpr ffi::DataType kF32 = ffi::DataType::F32;
  FFI_RETURN_IF_ERROR(CheckBuffer("lhs_scale", lhs_scale, kF32, m, kb));
  FFI_RETURN_IF_ERROR(CheckBuffer("rhs_scale", rhs_scale, kF32, config.is_1d1d ? n : nb, kb));
  FFI_RETURN_IF_ERROR(CheckBuffer("out", out, config.out_f32 ? kF32 : ffi::DataType::BF16, m, n));
  if (accum.size() != static_cast<size_t>(config.accumulate)) {
    return InvalidArgument("gemm: accum must be given if and only if accumulate is set; got ",
                           accum.size(), " more operands, accumulate ", config.accumulate);
  }
  GemmParams params = {};
  if (config.accumulate) {
    FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer buffer, accum.get<ffi::AnyBuffer>(0));
    FFI_RETURN_IF_ERROR(CheckBuffer("accum", buffer, kF32, m, n));
    params.accum = buffer.untyped_data();
    if (params.accum != out.untyped_data()) {
      return InvalidArgument("gemm: accum and out must share a buffer; got accum at ", params.accum,
                             ", out at ", out.untyped_data(), ". Alias them in ffi_call.");
    }
  }
  params.lhs_scale = lhs_scale.untyped_data();
  params.rhs_scale = rhs_scale.untyped_data();
  params.out = out.untyped_data();
  params.m = static_cast<int32_t>(m);
  params.n = static_cast<int32_t>(n);
  params.k = static_cast<int32_t>(k);
  return params;
}

ffi::Error Instantiate(GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckGemmConfig(config));
    FFI_ASSIGN_OR_RETURN([[maybe_unused]] auto cubin, GetOrCompile(GemmSource(config)));
    return ffi::Error::Success();
  });
}

ffi::Error Prepare(ffi::RemainingArgs, ffi::RemainingRets, GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckGemmConfig(config));
    FFI_ASSIGN_OR_RETURN([[maybe_unused]] CUkernel kernel,
                         GetKernel(GemmKernelName(config), GemmSmemBytes(config)));
    return ffi::Error::Success();
  });
}

ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                   ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::RemainingArgs accum,
                   ffi::Result<ffi::AnyBuffer> out, GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckGemmConfig(config));
    FFI_ASSIGN_OR_RETURN(GemmParams params,
                         BindParams(config, lhs, lhs_scale, rhs, rhs_scale, accum, *out));
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    const int64_t smem_bytes = GemmSmemBytes(config);
    FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(GemmKernelName(config), smem_bytes));
    FFI_RETURN_IF_ERROR(
        EncodeTensorMaps(*driver, config, lhs.untyped_data(), rhs.untyped_data(), params));
    const int64_t num_units_m = CeilDiv(params.m, config.block_m * config.cluster_m);
    const int64_t num_units_n = CeilDiv(params.n, config.block_n * config.cluster_n);
    params.raster = ChooseRaster(config, params.m, num_units_m, num_units_n);
    const int64_t cluster_size = config.cluster_m * config.cluster_n;
    LaunchDims dims = {};
    dims.grid_x = std::min(config.num_sms / cluster_size, num_units_m * num_units_n) * cluster_size;
    dims.grid_y = dims.grid_z = 1;
    dims.block_x = (config.num_consumers + 1) * 128;
    dims.dynamic_smem_bytes = smem_bytes;
    dims.cluster_x = cluster_size;
    void* arguments[] = {&params};
    return LaunchKernel(*driver, kernel, dims, stream, arguments);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GemmInstantiateHandler, Instantiate,
                              ffi::Ffi::BindInstantiate().Attr<GemmConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GemmPrepareHandler, Prepare,
    ffi::Ffi::BindPrepare().RemainingArgs().RemainingRets().Attr<GemmConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GemmExecuteHandler, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()  // lhs
                                  .Arg<ffi::AnyBuffer>()  // lhs_scale
                                  .Arg<ffi::AnyBuffer>()  // rhs
                                  .Arg<ffi::AnyBuffer>()  // rhs_scale
                                  .RemainingArgs()        // accum, if accumulate
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Attr<GemmConfig>("config"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_fp8gemm
