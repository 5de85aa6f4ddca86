#include "gemm/grouped_operands.h"

#include "buffers.h"
#include "gemm/product.h"

namespace jax_fp8gemm {
namespace {

int64_t MaxTiles(const GemmConfig& config, int64_t m, int64_t n, int64_t num_groups) {
  return (m / config.block_m + num_groups + 2) * CeilDiv(n, static_cast<int64_t>(config.block_n));
}

}  // namespace

ffi::Error CheckGroupedOperands(const char* op, const GemmConfig& config,
                                const GroupedOperands& operands, int64_t n) {
  constexpr ffi::DataType kF32 = ffi::DataType::F32, kS32 = ffi::DataType::S32;
  const int64_t m = operands.lhs.dimensions()[0], k = operands.lhs.dimensions()[1];
  const int64_t g = operands.group_sizes.dimensions()[0];
  const int64_t kb = CeilDiv(k, kScaleBlock), nb = CeilDiv(n, kScaleBlock);
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "lhs", operands.lhs, Fp8Type(config.lhs_e5m2), {m, k}));
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "lhs_scale", operands.lhs_scale, kF32, {m, kb}));
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "rhs", operands.rhs, Fp8Type(config.rhs_e5m2), {g * n, k}));
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "rhs_scale", operands.rhs_scale, kF32, {g * nb, kb}));
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "group_sizes", operands.group_sizes, kS32, {g}));
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "first_row", operands.first_row, kS32, {1}));
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "next_tile", operands.next_tile, kS32, {1}));
  if (MaxTiles(config, m, n, g) <= kMaxDim) return ffi::Error::Success();
  return InvalidArgument(op, ": tiles must be at most 2^30; got lhs ", ShapeText(operands.lhs),
                         ", rhs ", ShapeText(operands.rhs), ", group_sizes ",
                         ShapeText(operands.group_sizes));
}

GemmParams GroupedParams(const GemmConfig& config, const GroupedOperands& operands,
                         const ffi::AnyBuffer& out, int64_t n) {
  const int64_t m = operands.lhs.dimensions()[0], k = operands.lhs.dimensions()[1];
  GemmParams params =
      ProductParams(config, operands.lhs_scale.untyped_data(), operands.rhs_scale, out, m, n, k);
  params.num_groups = static_cast<int32_t>(operands.group_sizes.dimensions()[0]);
  params.group_sizes = static_cast<const int32_t*>(operands.group_sizes.untyped_data());
  params.first_row = static_cast<const int32_t*>(operands.first_row.untyped_data());
  params.next_tile = static_cast<int32_t*>(operands.next_tile.untyped_data());
  return params;
}

ffi::Error Clear(void* words, size_t count, CUstream stream) {
  FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
  const auto destination = reinterpret_cast<CUdeviceptr>(words);
  CU_RETURN_IF_ERROR(driver->cuMemsetD32Async(destination, 0, count, stream));
  return ffi::Error::Success();
}

ffi::Error LaunchGrouped(const GemmConfig& config, const GroupedOperands& operands,
                         const GemmParams& params, CUstream stream) {
  const int64_t g = params.num_groups;
  return LaunchGemm(config, params, {operands.lhs.untyped_data(), params.m, params.k},
                    {operands.rhs.untyped_data(), g * params.n, params.k}, params.m,
                    MaxTiles(config, params.m, params.n, g), stream);
}

}  // namespace jax_fp8gemm
