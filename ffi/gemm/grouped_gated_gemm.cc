#include "gemm/grouped_gated_gemm.h"

#include <cstdint>

#include "driver/driver.h"
#include "errors.h"
#include "gemm/gemm_config.h"
#include "gemm/grouped_extents.h"
#include "gemm/grouped_operands.h"
#include "gemm/product.h"
#include "jit/config_kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                   ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::AnyBuffer group_sizes,
                   ffi::AnyBuffer first_row, ffi::Result<ffi::AnyBuffer> h,
                   ffi::Result<ffi::AnyBuffer> h_scale, ffi::Result<ffi::AnyBuffer> next_tile,
                   GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    constexpr const char* kOp = "grouped_gated_gemm";
    FFI_RETURN_IF_ERROR(
        CheckGroupedExtents(kOp, config, Grouping::kRows, lhs, rhs, group_sizes, *h));
    const int64_t m = lhs.dimensions()[0], f = h->dimensions()[1];
    if (!config.gated || f % kScaleBlock != 0 || f > kMaxDim / 2) {
      return InvalidArgument(kOp, ": config must be gated, and f a multiple of 128 of at most 2^29",
                             "; got gated ", config.gated, ", h ", ShapeText(*h));
    }
    const GroupedOperands operands = {lhs,         lhs_scale, rhs,       rhs_scale,
                                      group_sizes, first_row, *next_tile};
    FFI_RETURN_IF_ERROR(CheckGroupedOperands(kOp, config, operands, 2 * f));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "h", *h, Fp8Type(config.h_e5m2), {m, f}));
    FFI_RETURN_IF_ERROR(
        CheckBuffer(kOp, "h_scale", *h_scale, ffi::DataType::F32, {m, f / kScaleBlock}));
    GemmParams params = GroupedParams(config, operands, *h, 2 * f);
    params.out_scale = h_scale->untyped_data();
    FFI_RETURN_IF_ERROR(Clear(params.next_tile, 1, stream));
    return LaunchGrouped(config, operands, params, stream);
  });
}

}  // namespace

FFI_DEFINE_HANDLERS(GroupedGatedGemm, GemmConfig,
                    BindProduct()
                        .Arg<ffi::AnyBuffer>()  // group_sizes
                        .Arg<ffi::AnyBuffer>()  // first_row
                        .Ret<ffi::AnyBuffer>()  // h
                        .Ret<ffi::AnyBuffer>()  // h_scale
                        .Ret<ffi::AnyBuffer>()  // next_tile
                        .Attr<GemmConfig>("config"));

}  // namespace jax_fp8gemm
