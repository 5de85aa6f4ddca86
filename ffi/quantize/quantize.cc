#include "quantize/quantize.h"

#include <algorithm>
#include <cstdint>

#include "buffers.h"
#include "driver/driver.h"
#include "errors.h"
#include "jit/config_kernel.h"
#include "quantize/quantize_config.h"
#include "quantize/quantize_params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

// Threads of an SM whose CTAs prefetch; must agree with kMinCtas in
// cuda/quantize/quantize_tile.cuh.
constexpr unsigned kPrefetchingThreads = 512;
// SwiGLU's CTAs start in turns where each still gets this many units: up to kMaxTurns for each that
// an SM holds. The GPU then gives the next units to the SM that is ready for them.
constexpr unsigned kUnitsOfTurn = 3;
constexpr unsigned kMaxTurns = 4;

// CTAs that prefetch, of `num_resident` that run at a time.
unsigned PrefetchingCtas(const QuantizeConfig& config, unsigned num_tiles, unsigned num_resident) {
  unsigned turns = 1;
  if (IsSwiglu(config) && config.mode != kRow) {
    const unsigned num_units = config.paired != 0 ? num_tiles / 2 : num_tiles;
    turns = std::clamp(num_units / (kUnitsOfTurn * num_resident), 1u, kMaxTurns);
  }
  return std::min(num_tiles, num_resident * turns);
}

// Nothing is launched where there is nothing to read, so there may be nothing to write.
ffi::Error CheckEmpty(const QuantizeConfig& config, const ffi::RemainingRets& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    FFI_ASSIGN_OR_RETURN(ffi::Result<ffi::AnyBuffer> result, results.get<ffi::AnyBuffer>(i));
    if (result->element_count() > 0) {
      return InvalidArgument(QuantizeOp(config), ": results of no rows must be empty; got ",
                             ShapeText(*result));
    }
  }
  return ffi::Error::Success();
}

ffi::Error Execute(CUstream stream, ffi::AnyBuffer x, ffi::RemainingArgs more,
                   ffi::RemainingRets results, QuantizeConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    if (x.element_count() == 0) return CheckEmpty(config, results);
    FFI_ASSIGN_OR_RETURN(QuantizeParams params, BindQuantizeParams(config, x, more, results));
    if (params.m == 0) return CheckEmpty(config, results);
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(config));
    const int64_t num_k_blocks = CeilDiv(params.k, kScaleBlock);
    LaunchDims dims = {};
    dims.grid_y = QuantizeBatchSize(x);
    dims.block_x = 32 * NumWarps(config);
    dims.dynamic_smem_bytes = DynamicSmemBytes(config);
    if (config.mode == kRow) {
      dims.grid_x = CeilDiv(CeilDiv(params.m, kWarpRows) * num_k_blocks, NumWarps(config));
    } else {
      params.num_m_blocks = CeilDiv(params.num_columns, kScaleBlock);
      if (config.ragged && StoresRowsAndColumns(config.mode)) {
        // Blocks of columns, and at most two more for the ends of the rows of no group.
        params.num_m_blocks =
            (params.m + (kScaleBlock - 1) * (params.num_groups + 2)) / kScaleBlock;
      }
      dims.grid_x = params.num_m_blocks * num_k_blocks;
    }
    if (dims.dynamic_smem_bytes > 0) {
      FFI_ASSIGN_OR_RETURN(const CUdevice device, CurrentDevice(*driver));
      FFI_ASSIGN_OR_RETURN(const int num_sms, NumSms(*driver, device));
      const unsigned num_resident = num_sms * (kPrefetchingThreads / dims.block_x);
      dims.grid_x = PrefetchingCtas(config, dims.grid_x, num_resident);
    }
    void* arguments[] = {&params};
    return LaunchKernel(*driver, kernel, dims, stream, arguments);
  });
}

}  // namespace

FFI_DEFINE_HANDLERS(Quantize, QuantizeConfig,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::PlatformStream<CUstream>>()
                        .Arg<ffi::AnyBuffer>()  // x, or gate_up
                        // dh; x_scale, rows, weights; if ragged, group_sizes, first_row
                        .RemainingArgs()
                        .RemainingRets()
                        .Attr<QuantizeConfig>("config"));

}  // namespace jax_fp8gemm
