#include "sum_rows/sum_rows.h"

#include <cstdint>

#include "buffers.h"
#include "driver/driver.h"
#include "errors.h"
#include "jit/config_kernel.h"
#include "sum_rows/sum_rows_config.h"
#include "sum_rows/sum_rows_params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

ffi::Error Execute(CUstream stream, ffi::AnyBuffer rows, ffi::AnyBuffer places,
                   ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer> sums, SumRowsConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    FFI_ASSIGN_OR_RETURN(SumRowsParams params,
                         BindSumRowsParams(config, rows, places, weights, *sums));
    if (sums->element_count() == 0) return ffi::Error::Success();
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(config));
    LaunchDims dims = {};
    const int64_t row_bytes = int64_t{params.k} * SumRowsElementBytes(config.input);
    dims.grid_x = CeilDiv(params.num_sums * CeilDiv(row_bytes, kSumPieceBytes), kSumWarps);
    dims.grid_y = 1;
    dims.block_x = 32 * kSumWarps;
    void* arguments[] = {&params};
    return LaunchKernel(*driver, kernel, dims, stream, arguments);
  });
}

}  // namespace

FFI_DEFINE_HANDLERS(SumRows, SumRowsConfig,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::PlatformStream<CUstream>>()
                        .Arg<ffi::AnyBuffer>()  // rows
                        .Arg<ffi::AnyBuffer>()  // places
                        .Arg<ffi::AnyBuffer>()  // weights
                        .Ret<ffi::AnyBuffer>()  // sums
                        .Attr<SumRowsConfig>("config"));

}  // namespace jax_fp8gemm
