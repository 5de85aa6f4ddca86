#include "grouped_gemm.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "driver.h"
#include "errors.h"
#include "gemm_config.h"
#include "gemm_launch.h"
#include "jit.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

constexpr ffi::DataType kF32 = ffi::DataType::F32, kS32 = ffi::DataType::S32;

// InvalidArgument unless lhs, rhs and out are matrices, group_sizes a vector of 1 to 1024 groups,
// and all extents are what the kernel can index.
ffi::Error CheckExtents(const char* op, const GemmConfig& config, int32_t grouping,
                        const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& rhs,
                        const ffi::AnyBuffer& group_sizes, const ffi::AnyBuffer& out) {
  FFI_RETURN_IF_ERROR(CheckGemmConfig(config));
  const bool are_matrices = lhs.dimensions().size() == 2 && rhs.dimensions().size() == 2 &&
                            out.dimensions().size() == 2 && group_sizes.dimensions().size() == 1;
  const int64_t g = are_matrices ? group_sizes.dimensions()[0] : 0;
  bool is_in_range = config.grouping == grouping && 1 <= g && g <= kMaxGroups;
  if (is_in_range) {
    const int64_t extents[] = {lhs.dimensions()[0], lhs.dimensions()[1], rhs.dimensions()[0],
                               out.dimensions()[0], out.dimensions()[1]};
    const auto [least, most] = std::minmax_element(std::begin(extents), std::end(extents));
    is_in_range = *least >= 1 && *most <= kMaxDim && lhs.dimensions()[1] % 16 == 0 &&
                  out.dimensions()[1] % 8 == 0;
  }
  if (is_in_range) return ffi::Error::Success();
  return InvalidArgument(op, ": lhs, rhs and out must be matrices with extents in 1..2^30, k a ",
                         "multiple of 16 and n of 8, and group_sizes must have 1..1024 groups; ",
                         "got lhs ", ShapeText(lhs), ", rhs ", ShapeText(rhs), ", group_sizes ",
                         ShapeText(group_sizes), ", out ", ShapeText(out));
}

ffi::Error Instantiate(GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckGemmConfig(config));
    FFI_ASSIGN_OR_RETURN([[maybe_unused]] auto cubin, GetOrCompile(GemmSource(config)));
    return ffi::Error::Success();
  });
}

ffi::Error InstantiateRows(GemmConfig config, int32_t) { return Instantiate(config); }

ffi::Error Prepare(ffi::RemainingArgs, ffi::RemainingRets, GemmConfig config) {
  return NoThrow([&] { return PrepareGemm(config); });
}

ffi::Error PrepareRows(ffi::RemainingArgs, ffi::RemainingRets, GemmConfig config, int32_t) {
  return NoThrow([&] { return PrepareGemm(config); });
}

ffi::Error Zero(const Driver& driver, void* words, size_t count, CUstream stream) {
  const auto destination = reinterpret_cast<CUdeviceptr>(words);
  CU_RETURN_IF_ERROR(driver.cuMemsetD32Async(destination, 0, count, stream));
  return ffi::Error::Success();
}

ffi::Error ExecuteRows(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                       ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::AnyBuffer group_sizes,
                       ffi::AnyBuffer first_row, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Result<ffi::AnyBuffer> next_tile, GemmConfig config,
                       int32_t rows_per_group) {
  return NoThrow([&]() -> ffi::Error {
    constexpr const char* kOp = "grouped_gemm";
    FFI_RETURN_IF_ERROR(CheckExtents(kOp, config, 1, lhs, rhs, group_sizes, *out));
    const int64_t m = lhs.dimensions()[0], k = lhs.dimensions()[1], n = out->dimensions()[1];
    const int64_t g = group_sizes.dimensions()[0];
    const int64_t kb = CeilDiv(k, kScaleBlock), nb = CeilDiv(n, kScaleBlock);
    const ffi::DataType out_type = config.out_f32 ? kF32 : ffi::DataType::BF16;
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "lhs", lhs, Fp8Type(config.lhs_e5m2), {m, k}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "lhs_scale", lhs_scale, kF32, {m, kb}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs", rhs, Fp8Type(config.rhs_e5m2), {g * n, k}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs_scale", rhs_scale, kF32, {g * nb, kb}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "group_sizes", group_sizes, kS32, {g}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "first_row", first_row, kS32, {1}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "out", *out, out_type, {m, n}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "next_tile", *next_tile, kS32, {1}));
    const int64_t max_tiles =
        (m / config.block_m + g + 2) * CeilDiv(n, static_cast<int64_t>(config.block_n));
    if ((rows_per_group != 0 && g * rows_per_group != m) || max_tiles > kMaxDim) {
      return InvalidArgument(kOp, ": rows_per_group must be 0 or m / g, and tiles at most 2^30; ",
                             "got rows_per_group ", rows_per_group, ", lhs ", ShapeText(lhs),
                             ", group_sizes ", ShapeText(group_sizes));
    }
    GemmParams params = {};
    params.lhs_scale = lhs_scale.untyped_data();
    params.rhs_scale = rhs_scale.untyped_data();
    params.out = out->untyped_data();
    params.m = params.lhs_rows = static_cast<int32_t>(m);
    params.n = static_cast<int32_t>(n);
    params.k = static_cast<int32_t>(k);
    params.num_groups = static_cast<int32_t>(g);
    params.rows_per_group = rows_per_group;
    params.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
    params.first_row = static_cast<const int32_t*>(first_row.untyped_data());
    params.next_tile = static_cast<int32_t*>(next_tile->untyped_data());
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    FFI_RETURN_IF_ERROR(Zero(*driver, params.next_tile, 1, stream));
    // In the masked form the kernel stores the rows of the groups alone.
    if (rows_per_group > 0) {
      FFI_RETURN_IF_ERROR(Zero(*driver, params.out, out->size_bytes() / 4, stream));
    }
    return LaunchGemm(config, params, lhs.untyped_data(), rhs.untyped_data(), g * n, m, max_tiles,
                      stream);
  });
}

ffi::Error ExecuteWgrad(CUstream stream, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                        ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::AnyBuffer group_sizes,
                        ffi::RemainingArgs accum, ffi::Result<ffi::AnyBuffer> out,
                        GemmConfig config) {
  return NoThrow([&]() -> ffi::Error {
    constexpr const char* kOp = "grouped_wgrad";
    FFI_RETURN_IF_ERROR(CheckExtents(kOp, config, 2, lhs, rhs, group_sizes, *out));
    const int64_t m = lhs.dimensions()[0], t = lhs.dimensions()[1], n = rhs.dimensions()[0];
    const int64_t g = group_sizes.dimensions()[0], tb = CeilDiv(t, kScaleBlock);
    const ffi::DataType out_type = config.out_f32 ? kF32 : ffi::DataType::BF16;
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "lhs", lhs, Fp8Type(config.lhs_e5m2), {m, t}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "lhs_scale", lhs_scale, kF32, {m, tb}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs", rhs, Fp8Type(config.rhs_e5m2), {n, t}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "rhs_scale", rhs_scale, kF32, {n, tb}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "group_sizes", group_sizes, kS32, {g}));
    FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "out", *out, out_type, {g * m, n}));
    const int64_t max_tiles = g * CeilDiv(m, static_cast<int64_t>(config.block_m)) *
                              CeilDiv(n, static_cast<int64_t>(config.block_n));
    if (t % kScaleBlock != 0 || max_tiles > kMaxDim ||
        accum.size() != static_cast<size_t>(config.accumulate)) {
      return InvalidArgument(kOp, ": t must be a multiple of 128, tiles at most 2^30, and accum ",
                             "given if and only if accumulate is set; got lhs ", ShapeText(lhs),
                             ", ", accum.size(), " more operands, accumulate ", config.accumulate);
    }
    GemmParams params = {};
    if (config.accumulate) {
      FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer buffer, accum.get<ffi::AnyBuffer>(0));
      FFI_RETURN_IF_ERROR(CheckBuffer(kOp, "accum", buffer, kF32, {g * m, n}));
      params.accum = buffer.untyped_data();
      if (params.accum != out->untyped_data()) {
        return InvalidArgument(kOp, ": accum and out must share a buffer; got accum at ",
                               params.accum, ", out at ", out->untyped_data());
      }
    }
    params.lhs_scale = lhs_scale.untyped_data();
    params.rhs_scale = rhs_scale.untyped_data();
    params.out = out->untyped_data();
    params.m = params.lhs_rows = static_cast<int32_t>(m);
    params.n = static_cast<int32_t>(n);
    params.k = static_cast<int32_t>(t);
    params.num_groups = static_cast<int32_t>(g);
    params.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
    return LaunchGemm(config, params, lhs.untyped_data(), rhs.untyped_data(), n, g * m, max_tiles,
                      stream);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GroupedGemmInstantiateHandler, InstantiateRows,
    ffi::Ffi::BindInstantiate().Attr<GemmConfig>("config").Attr<int32_t>("rows_per_group"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedGemmPrepareHandler, PrepareRows,
                              ffi::Ffi::BindPrepare()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<GemmConfig>("config")
                                  .Attr<int32_t>("rows_per_group"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedGemmExecuteHandler, ExecuteRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()  // lhs
                                  .Arg<ffi::AnyBuffer>()  // lhs_scale
                                  .Arg<ffi::AnyBuffer>()  // rhs
                                  .Arg<ffi::AnyBuffer>()  // rhs_scale
                                  .Arg<ffi::AnyBuffer>()  // group_sizes
                                  .Arg<ffi::AnyBuffer>()  // first_row
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // next_tile
                                  .Attr<GemmConfig>("config")
                                  .Attr<int32_t>("rows_per_group"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedWgradInstantiateHandler, Instantiate,
                              ffi::Ffi::BindInstantiate().Attr<GemmConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GroupedWgradPrepareHandler, Prepare,
    ffi::Ffi::BindPrepare().RemainingArgs().RemainingRets().Attr<GemmConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedWgradExecuteHandler, ExecuteWgrad,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()  // lhs
                                  .Arg<ffi::AnyBuffer>()  // lhs_scale
                                  .Arg<ffi::AnyBuffer>()  // rhs
                                  .Arg<ffi::AnyBuffer>()  // rhs_scale
                                  .Arg<ffi::AnyBuffer>()  // group_sizes
                                  .RemainingArgs()        // accum, if accumulate
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Attr<GemmConfig>("config"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_fp8gemm
