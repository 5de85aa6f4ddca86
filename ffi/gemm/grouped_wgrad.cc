#include "gemm/grouped_wgrad.h"

#include <cstdint>

#include "driver/driver.h"
#include "errors.h"
#include "gemm/gemm_config.h"
#include "gemm/gemm_launch.h"
#include "gemm/grouped_extents.h"
#include "gemm/product.h"
#include "jit/config_kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                   ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::AnyBuffer group_sizes,
                   ffi::RemainingArgs accum, ffi::Result<ffi::AnyBuffer> out, GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    constexpr const char* kOp = "grouped_wgrad";
    constexpr ffi::DataType kF32 = ffi::DataType::F32, kS32 = ffi::DataType::S32;
    FFI_RETURN_IF_ERROR(
        CheckGroupedExtents(kOp, config, Grouping::kContraction, lhs, rhs, group_sizes, *out));
    const int64_t m = lhs.dimensions()[0], t = lhs.dimensions()[1], n = rhs.dimensions()[0];
    const int64_t g = group_sizes.dimensions()[0], tb = CeilDiv(t, kScaleBlock);
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "lhs", lhs, Fp8Type(config.lhs_e5m2), {m, t}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "lhs_scale", lhs_scale, kF32, {m, tb}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs", rhs, Fp8Type(config.rhs_e5m2), {n, t}));
    const int64_t nb = config.is_1d1d ? n : CeilDiv(n, kScaleBlock);
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs_scale", rhs_scale, kF32, {nb, tb}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "group_sizes", group_sizes, kS32, {g}));
    const int64_t rows = config.transpose_out ? n : m, columns = config.transpose_out ? m : n;
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "out", *out, OutType(config), {g * rows, columns}));
    const int64_t max_tiles = g * CeilDiv(m, static_cast<int64_t>(config.block_m)) *
                              CeilDiv(n, static_cast<int64_t>(config.block_n));
    if (t % kScaleBlock != 0 || max_tiles > kMaxDim) {
      return InvalidArgument(kOp, ": t must be a multiple of 128, and tiles at most 2^30; got lhs ",
                             ShapeText(lhs), ", out ", ShapeText(*out));
    }
    FFI_RETURN_IF_ERROR(CheckAccum(kOp, config, accum, *out));
    GemmParams params = ProductParams(config, lhs_scale.untyped_data(), rhs_scale, *out, m, n, t);
    params.num_groups = static_cast<int32_t>(g);
    params.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
    return LaunchGemm(config, params, {lhs.untyped_data(), m, t}, {rhs.untyped_data(), n, t},
                      g * rows, max_tiles, stream);
  });
}

}  // namespace

FFI_DEFINE_HANDLERS(GroupedWgrad, GemmConfig,
                    BindProduct()
                        .Arg<ffi::AnyBuffer>()  // group_sizes
                        .RemainingArgs()        // accum, if accumulate
                        .Ret<ffi::AnyBuffer>()  // out
                        .Attr<GemmConfig>("config"));

}  // namespace jax_fp8gemm
