#include "copy_rows/copy_rows.h"

#include <cstdint>

#include "buffers.h"
#include "copy_rows/copy_rows_config.h"
#include "copy_rows/copy_rows_params.h"
#include "driver/driver.h"
#include "errors.h"
#include "jit/config_kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

ffi::Error Execute(CUstream stream, ffi::AnyBuffer x, ffi::AnyBuffer x_scale, ffi::AnyBuffer places,
                   ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> scale,
                   CopyRowsConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    FFI_ASSIGN_OR_RETURN(CopyRowsParams params,
                         BindCopyRowsParams(config, x, x_scale, places, *values, *scale));
    if (x.element_count() == 0 || places.element_count() == 0 || params.m == 0) {
      return ffi::Error::Success();
    }
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(config));
    LaunchDims dims = {};
    const int64_t num_pieces = params.num_sources * CeilDiv(params.k, kPieceBytes);
    dims.grid_x = CeilDiv(num_pieces, kCopyWarps);
    dims.grid_y = 1;
    dims.block_x = 32 * kCopyWarps;
    void* arguments[] = {&params};
    return LaunchKernel(*driver, kernel, dims, stream, arguments);
  });
}

}  // namespace

FFI_DEFINE_HANDLERS(CopyRows, CopyRowsConfig,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::PlatformStream<CUstream>>()
                        .Arg<ffi::AnyBuffer>()  // x
                        .Arg<ffi::AnyBuffer>()  // x_scale
                        .Arg<ffi::AnyBuffer>()  // places
                        .Ret<ffi::AnyBuffer>()  // values
                        .Ret<ffi::AnyBuffer>()  // scale
                        .Attr<CopyRowsConfig>("config"));

}  // namespace jax_fp8gemm
