#include "gemm/grouped_gemm.h"

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

ffi::Error Zero(const Driver& driver, void* words, size_t count, CUstream stream) {
  const auto destination = reinterpret_cast<CUdeviceptr>(words);
  CU_RETURN_IF_ERROR(driver.cuMemsetD32Async(destination, 0, count, stream));
  return ffi::Error::Success();
}

ffi::Error Execute(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                   ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::AnyBuffer group_sizes,
                   ffi::AnyBuffer first_row, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> next_tile, GemmConfig config, int32_t rows_per_group,
                   int32_t clears_unused) {
  return NoThrow([&]() -> ffi::Error {
    constexpr const char* kOp = "grouped_gemm";
    constexpr ffi::DataType kF32 = ffi::DataType::F32, kS32 = ffi::DataType::S32;
    FFI_RETURN_IF_ERROR(
        CheckGroupedExtents(kOp, config, Grouping::kRows, lhs, rhs, group_sizes, *out));
    const int64_t m = lhs.dimensions()[0], k = lhs.dimensions()[1], n = out->dimensions()[1];
    const int64_t g = group_sizes.dimensions()[0];
    const int64_t kb = CeilDiv(k, kScaleBlock), nb = CeilDiv(n, kScaleBlock);
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "lhs", lhs, Fp8Type(config.lhs_e5m2), {m, k}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "lhs_scale", lhs_scale, kF32, {m, kb}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs", rhs, Fp8Type(config.rhs_e5m2), {g * n, k}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs_scale", rhs_scale, kF32, {g * nb, kb}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "group_sizes", group_sizes, kS32, {g}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "first_row", first_row, kS32, {1}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "out", *out, OutType(config), {m, n}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "next_tile", *next_tile, kS32, {1}));
    const int64_t max_tiles =
        (m / config.block_m + g + 2) * CeilDiv(n, static_cast<int64_t>(config.block_n));
    const bool is_flag = clears_unused == 0 || clears_unused == 1;
    if ((rows_per_group != 0 && g * rows_per_group != m) || max_tiles > kMaxDim || !is_flag) {
      return InvalidArgument(kOp, ": rows_per_group must be 0 or m / g, tiles at most 2^30, and ",
                             "clears_unused 0 or 1; got rows_per_group ", rows_per_group, ", lhs ",
                             ShapeText(lhs), ", group_sizes ", ShapeText(group_sizes),
                             ", clears_unused ", clears_unused);
    }
    GemmParams params = ProductParams(config, lhs_scale, rhs_scale, *out, m, n, k);
    params.num_groups = static_cast<int32_t>(g);
    params.rows_per_group = rows_per_group;
    params.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
    params.first_row = static_cast<const int32_t*>(first_row.untyped_data());
    params.next_tile = static_cast<int32_t*>(next_tile->untyped_data());
    params.clears_rest = rows_per_group == 0 && clears_unused == 1;
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    FFI_RETURN_IF_ERROR(Zero(*driver, params.next_tile, 1, stream));
    // In the masked form the kernel stores the rows of the groups alone.
    if (rows_per_group > 0 && clears_unused == 1) {
      FFI_RETURN_IF_ERROR(Zero(*driver, params.out, out->size_bytes() / 4, stream));
    }
    return LaunchGemm(config, params, lhs.untyped_data(), rhs.untyped_data(), g * n, m, max_tiles,
                      stream);
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
