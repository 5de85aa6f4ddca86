#include "gemm/gemm.h"

#include <algorithm>
#include <cstdint>

#include "driver/driver.h"
#include "errors.h"
#include "gemm/gemm_config.h"
#include "gemm/gemm_launch.h"
#include "gemm/product.h"
#include "jit/config_kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

// Returns the columns of out. In a 1d2d product they are the rows of rhs, rounded up to a multiple
// of 8, and otherwise as many as those rows.
int64_t CountColumns(const GemmConfig& config, int64_t rhs_rows) {
  const bool is_1d2d = !config.is_1d1d && !config.transpose_out;
  return is_1d2d ? CeilDiv(rhs_rows, 8) * 8 : rhs_rows;
}

// Returns a matrix as an operand.
Operand OperandOf(const ffi::AnyBuffer& x) {
  return {x.untyped_data(), x.dimensions()[0], x.dimensions()[1]};
}

ffi::Error CheckValues(const GemmConfig& config, const ffi::AnyBuffer& lhs,
                       const ffi::AnyBuffer& rhs) {
  if (!IsMatrix(lhs, Fp8Type(config.lhs_e5m2)) || !IsMatrix(rhs, Fp8Type(config.rhs_e5m2)) ||
      CeilDiv(lhs.dimensions()[1], kScaleBlock) != CeilDiv(rhs.dimensions()[1], kScaleBlock)) {
    return InvalidArgument("gemm: lhs must be ", ShortType(Fp8Type(config.lhs_e5m2)),
                           "[m,k] and rhs ", ShortType(Fp8Type(config.rhs_e5m2)),
                           "[n,k] of as many k-blocks, at multiples of 16 bytes above 0; got lhs ",
                           ShapeText(lhs), " at ", lhs.untyped_data(), ", rhs ", ShapeText(rhs),
                           " at ", rhs.untyped_data());
  }
  if (GroupingOf(config) != Grouping::kNone || config.quantizes_lhs) {
    return InvalidArgument("gemm: config must have grouping 0 and quantizes_lhs 0; got ",
                           config.grouping, " and ", config.quantizes_lhs);
  }
  const int64_t m = lhs.dimensions()[0], k = lhs.dimensions()[1], rhs_k = rhs.dimensions()[1];
  const int64_t n = CountColumns(config, rhs.dimensions()[0]);
  const bool is_in_range = 1 <= std::min({m, n, k}) && std::max({m, n, k}) <= kMaxDim;
  const int64_t num_tiles =
      is_in_range ? CeilDiv(m, config.block_m) * CeilDiv(n, config.block_n) : 0;
  const int64_t row = config.transpose_out ? m : n;
  if (!is_in_range || k % 16 != 0 || rhs_k % 16 != 0 || row % 8 != 0 || num_tiles > kMaxDim) {
    return InvalidArgument("gemm: m, n and k must be in 1..2^30, k a multiple of 16, ",
                           config.transpose_out ? "m" : "n", " of 8, and tiles of out at most ",
                           "2^30; got lhs ", ShapeText(lhs), ", rhs ", ShapeText(rhs),
                           ". Pad lhs and rhs with zeros.");
  }
  if (config.cluster_k > 1 && k > MostSplitK(config)) {
    return InvalidArgument("gemm: k must be at most ", MostSplitK(config), " with ",
                           KernelName(config), "; got lhs ", ShapeText(lhs), ", rhs ",
                           ShapeText(rhs), ". Take a config without cluster_k.");
  }
  return ffi::Error::Success();
}

// The kernel's parameters but for the tensor maps, after a check of every buffer.
ffi::ErrorOr<GemmParams> BindParams(const GemmConfig& config, const ffi::AnyBuffer& lhs,
                                    const ffi::AnyBuffer& lhs_scale, const ffi::AnyBuffer& rhs,
                                    const ffi::AnyBuffer& rhs_scale,
                                    const ffi::RemainingArgs& accum, const ffi::AnyBuffer& out) {
  FFI_RETURN_IF_ERROR(CheckValues(config, lhs, rhs));
  const int64_t m = lhs.dimensions()[0], k = lhs.dimensions()[1];
  const int64_t n = CountColumns(config, rhs.dimensions()[0]);
  const int64_t kb = CeilDiv(k, kScaleBlock), nb = CeilDiv(n, kScaleBlock);
  constexpr ffi::DataType kF32 = ffi::DataType::F32;
  FFI_RETURN_IF_ERROR(CheckBuffer("gemm", "lhs_scale", lhs_scale, kF32, {m, kb}));
  FFI_RETURN_IF_ERROR(
      CheckBuffer("gemm", "rhs_scale", rhs_scale, kF32, {config.is_1d1d ? n : nb, kb}));
  const int64_t rows = config.transpose_out ? n : m, columns = config.transpose_out ? m : n;
  FFI_RETURN_IF_ERROR(CheckBuffer("gemm", "out", out, OutType(config), {rows, columns}));
  FFI_RETURN_IF_ERROR(CheckAccum("gemm", config, accum, out));
  return ProductParams(config, lhs_scale.untyped_data(), rhs_scale, out, m, n, k);
}

ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                   ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::RemainingArgs accum,
                   ffi::Result<ffi::AnyBuffer> out, GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    FFI_ASSIGN_OR_RETURN(GemmParams params,
                         BindParams(config, lhs, lhs_scale, rhs, rhs_scale, accum, *out));
    const int64_t num_units = CeilDiv(params.m, config.block_m * config.cluster_m) *
                              CeilDiv(params.n, config.block_n * config.cluster_n);
    return LaunchGemm(config, params, OperandOf(lhs), OperandOf(rhs),
                      config.transpose_out ? params.n : params.m,
                      num_units * config.cluster_m * config.cluster_n, stream);
  });
}

}  // namespace

FFI_DEFINE_HANDLERS(Gemm, GemmConfig,
                    BindProduct()
                        .RemainingArgs()        // accum, if accumulate
                        .Ret<ffi::AnyBuffer>()  // out
                        .Attr<GemmConfig>("config"));

}  // namespace jax_fp8gemm
