#include "sum_rows/sum_rows_config.h"

#include <iterator>

#include "errors.h"

namespace jax_fp8gemm {

ffi::Error CheckConfig(const SumRowsConfig& config) {
  const bool is_input =
      config.input >= 0 && config.input < static_cast<int32_t>(std::size(kSumRowsInputs));
  if (is_input &&
      (config.word_bytes == 16 || config.word_bytes == SumRowsElementBytes(config.input))) {
    return ffi::Error::Success();
  }
  return InvalidArgument("sum_rows: input must be 0, 1 or 2 (bf16, f16, f32) and word_bytes 16 or ",
                         "the bytes of an element; got input ", config.input, ", word_bytes ",
                         config.word_bytes);
}

std::string KernelName(const SumRowsConfig& config) {
  constexpr const char* kNames[] = {"bf16", "f16", "f32"};
  return StrCat("sum_rows_", kNames[config.input], "_by_", config.word_bytes);
}

int64_t DynamicSmemBytes(const SumRowsConfig&) { return 0; }

KernelSource MakeKernelSource(const SumRowsConfig& config) {
  const std::string name = KernelName(config);
  return {name, StrCat("#define JAX_FP8GEMM_KERNEL ", name, "\n",
                       "struct Config {\n"
                       "  static constexpr int kInput = ",
                       config.input, ", kWordBytes = ", config.word_bytes,
                       ";\n};\n#include \"sum_rows/sum_rows.cuh\"\n")};
}

}  // namespace jax_fp8gemm
