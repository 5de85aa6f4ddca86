// How a kernel that copies rows is compiled.

#ifndef JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_CONFIG_H_
#define JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_CONFIG_H_

#include <cstdint>
#include <string>

#include "config_attribute.h"
#include "jit/jit.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// The attribute `config`: all that is compiled in.
struct CopyRowsConfig {
  int32_t word_bytes;  // what a thread loads and stores at once: 1 or 16
};

template <>
struct ConfigFields<CopyRowsConfig> : FieldsOf<CopyRowsConfig, &CopyRowsConfig::word_bytes> {};

// InvalidArgument, with the rule, if no kernel can be built from the config.
ffi::Error CheckConfig(const CopyRowsConfig& config);

// The symbol of the kernel; carries every field.
std::string KernelName(const CopyRowsConfig& config);

// Dynamic shared memory of a CTA: none.
int64_t DynamicSmemBytes(const CopyRowsConfig& config);

// The translation unit of a config that CheckConfig accepts.
KernelSource MakeKernelSource(const CopyRowsConfig& config);

}  // namespace jax_fp8gemm

FFI_DECODE_CONFIG(CopyRowsConfig);

#endif  // JAX_FP8GEMM_COPY_ROWS_COPY_ROWS_CONFIG_H_
