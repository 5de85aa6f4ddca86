#include "gemm/quantizing_gemm.h"

#include <algorithm>
#include <cstdint>

#include "buffers.h"
#include "driver/driver.h"
#include "errors.h"
#include "gemm/gemm_config.h"
#include "gemm/gemm_launch.h"
#include "gemm/product.h"
#include "jit/config_kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

constexpr const char* kOp = "quantizing_gemm";

// The kernel's parameters but for the tensor maps, after a check of every buffer.
ffi::ErrorOr<GemmParams> BindParams(const GemmConfig& config, const ffi::AnyBuffer& lhs,
                                    const ffi::AnyBuffer& rhs, const ffi::AnyBuffer& rhs_scale,
                                    const ffi::AnyBuffer& out) {
  if (!config.quantizes_lhs) {
    return InvalidArgument(kOp, ": config must have quantizes_lhs 1; got 0");
  }
  if (!IsMatrix(lhs, ffi::DataType::BF16) || !IsMatrix(rhs, Fp8Type(config.rhs_e5m2)) ||
      CeilDiv(lhs.dimensions()[1], kScaleBlock) != CeilDiv(rhs.dimensions()[1], kScaleBlock)) {
    return InvalidArgument(
        kOp, ": lhs must be bf16[m,k] and rhs ", ShortType(Fp8Type(config.rhs_e5m2)),
        "[n,k] of as many k-blocks, at multiples of 16 bytes above 0; got lhs ", ShapeText(lhs),
        " at ", lhs.untyped_data(), ", rhs ", ShapeText(rhs), " at ", rhs.untyped_data());
  }
  const int64_t m = lhs.dimensions()[0], k = lhs.dimensions()[1];
  const int64_t rhs_k = rhs.dimensions()[1], n = CeilDiv(rhs.dimensions()[0], 8) * 8;
  const int64_t most_k = config.cluster_k > 1 ? MostSplitK(config) : kMaxDim;
  if (std::min({m, n, k}) < 1 || m > kMostQuantizedRows || n > kMaxDim ||
      std::max(k, rhs_k) > most_k || k % 8 != 0 || rhs_k % 16 != 0) {
    return InvalidArgument(kOp, ": with this config m must be in 1..", kMostQuantizedRows,
                           ", n in 1..2^30, k in 1..", most_k,
                           ", k of lhs a multiple of 8, and k of rhs of 16; got lhs ",
                           ShapeText(lhs), ", rhs ", ShapeText(rhs), ", ", KernelName(config));
  }
  const int64_t kb = CeilDiv(k, kScaleBlock), nb = CeilDiv(n, kScaleBlock);
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs_scale", rhs_scale, ffi::DataType::F32, {nb, kb}));
  FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "out", out, OutType(config), {m, n}));
  // No scales of lhs are in memory.
  GemmParams params = ProductParams(config, nullptr, rhs_scale, out, m, n, k);
  params.lhs_rows = 0;
  params.lhs_values = lhs.untyped_data();
  params.lhs_columns = static_cast<int32_t>(k);
  return params;
}

ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                   ffi::AnyBuffer rhs_scale, ffi::Result<ffi::AnyBuffer> out, GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    FFI_ASSIGN_OR_RETURN(GemmParams params, BindParams(config, lhs, rhs, rhs_scale, *out));
    const Operand rows = {lhs.untyped_data(), params.m, params.lhs_columns};
    const Operand columns = {rhs.untyped_data(), rhs.dimensions()[0], rhs.dimensions()[1]};
    const int64_t num_tiles = CeilDiv(params.n, config.block_n);
    return LaunchGemm(config, params, rows, columns, params.m, num_tiles, stream);
  });
}

}  // namespace

FFI_DEFINE_HANDLERS(QuantizingGemm, GemmConfig,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::PlatformStream<CUstream>>()
                        .Arg<ffi::AnyBuffer>()  // lhs
                        .Arg<ffi::AnyBuffer>()  // rhs
                        .Arg<ffi::AnyBuffer>()  // rhs_scale
                        .Ret<ffi::AnyBuffer>()  // out
                        .Attr<GemmConfig>("config"));

}  // namespace jax_fp8gemm
