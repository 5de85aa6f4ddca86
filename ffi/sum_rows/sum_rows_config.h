// How a kernel that adds rows is compiled.

#ifndef JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_CONFIG_H_
#define JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_CONFIG_H_

#include <cstdint>
#include <string>

#include "config_attribute.h"
#include "jit/jit.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// The attribute `config`: all that is compiled in.
struct SumRowsConfig {
  int32_t input;       // dtype of rows: an index into kSumRowsInputs
  int32_t word_bytes;  // what a thread loads and stores at once: 16, or an element
};

template <>
struct ConfigFields<SumRowsConfig>
    : FieldsOf<SumRowsConfig, &SumRowsConfig::input, &SumRowsConfig::word_bytes> {};

// Mirrored by AddedWord in cuda/sum_rows/added_word.cuh.
constexpr ffi::DataType kSumRowsInputs[] = {ffi::DataType::BF16, ffi::DataType::F16,
                                            ffi::DataType::F32};

// The bytes of an element of an input in range.
constexpr int32_t SumRowsElementBytes(int32_t input) { return input == 2 ? 4 : 2; }

// InvalidArgument, with the rule, if no kernel can be built from the config.
ffi::Error CheckConfig(const SumRowsConfig& config);

// The symbol of the kernel; carries every field.
std::string KernelName(const SumRowsConfig& config);

// Dynamic shared memory of a CTA: none.
int64_t DynamicSmemBytes(const SumRowsConfig& config);

// The translation unit of a config that CheckConfig accepts.
KernelSource MakeKernelSource(const SumRowsConfig& config);

}  // namespace jax_fp8gemm

FFI_DECODE_CONFIG(SumRowsConfig);

#endif  // JAX_FP8GEMM_SUM_ROWS_SUM_ROWS_CONFIG_H_
