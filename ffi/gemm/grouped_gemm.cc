#include "gemm/grouped_gemm.h"

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

// Values of clears_unused.
constexpr int32_t kInKernel = 1, kByFill = 2;

ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                   ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::AnyBuffer group_sizes,
                   ffi::AnyBuffer first_row, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> next_tile, GemmConfig config, int32_t rows_per_group,
                   int32_t clears_unused) {
  return NoThrow([&]() -> ffi::Error {
    constexpr const char* kOp = "grouped_gemm";
    FFI_RETURN_IF_ERROR(
        CheckGroupedExtents(kOp, config, Grouping::kRows, lhs, rhs, group_sizes, *out));
    const int64_t m = lhs.dimensions()[0], n = out->dimensions()[1];
    const int64_t g = group_sizes.dimensions()[0];
    const GroupedOperands operands = {lhs,         lhs_scale, rhs,       rhs_scale,
                                      group_sizes, first_row, *next_tile};
    FFI_RETURN_IF_ERROR(CheckGroupedOperands(kOp, config, operands, n));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "out", *out, OutType(config), {m, n}));
    const bool is_masked = rows_per_group != 0;
    const bool can_clear = clears_unused >= 0 && clears_unused <= (is_masked ? kByFill : kInKernel);
    if ((is_masked && g * rows_per_group != m) || !can_clear || config.gated) {
      return InvalidArgument(kOp, ": rows_per_group must be 0 or m / g, clears_unused 0, 1 or, ",
                             "with rows_per_group, 2, and config not gated; got rows_per_group ",
                             rows_per_group, ", lhs ", ShapeText(lhs), ", group_sizes ",
                             ShapeText(group_sizes), ", clears_unused ", clears_unused, ", gated ",
                             config.gated);
    }
    GemmParams params = GroupedParams(config, operands, *out, n);
    params.rows_per_group = rows_per_group;
    params.clears_rest = clears_unused == kInKernel;
    FFI_RETURN_IF_ERROR(Clear(params.next_tile, 1, stream));
    if (clears_unused == kByFill) {
      FFI_RETURN_IF_ERROR(Clear(params.out, out->size_bytes() / 4, stream));
    }
    return LaunchGrouped(config, operands, params, stream);
  });
}

// The macros below take no comma in a name.
constexpr auto kInstantiate = Instantiate<GemmConfig, int32_t, int32_t>;
constexpr auto kPrepare = Prepare<GemmConfig, int32_t, int32_t>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GroupedGemmInstantiateHandler, kInstantiate,
    BindInstantiate<GemmConfig>().Attr<int32_t>("rows_per_group").Attr<int32_t>("clears_unused"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GroupedGemmPrepareHandler, kPrepare,
    BindPrepare<GemmConfig>().Attr<int32_t>("rows_per_group").Attr<int32_t>("clears_unused"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedGemmExecuteHandler, Execute,
                              BindProduct()
                                  .Arg<ffi::AnyBuffer>()  // group_sizes
                                  .Arg<ffi::AnyBuffer>()  // first_row
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // next_tile
                                  .Attr<GemmConfig>("config")
                                  .Attr<int32_t>("rows_per_group")
                                  .Attr<int32_t>("clears_unused"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_fp8gemm
