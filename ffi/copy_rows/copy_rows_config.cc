#include "copy_rows/copy_rows_config.h"

#include "errors.h"

namespace jax_fp8gemm {

ffi::Error CheckConfig(const CopyRowsConfig& config) {
  if (config.word_bytes == 1 || config.word_bytes == 16) return ffi::Error::Success();
  return InvalidArgument("copy_rows: word_bytes must be 1 or 16; got ", config.word_bytes);
}

std::string KernelName(const CopyRowsConfig& config) {
  return StrCat("copy_rows_by_", config.word_bytes);
}

int64_t DynamicSmemBytes(const CopyRowsConfig&) { return 0; }

KernelSource MakeKernelSource(const CopyRowsConfig& config) {
  const std::string name = KernelName(config);
  return {name, StrCat("#define JAX_FP8GEMM_KERNEL ", name, "\n",
                       "struct Config {\n"
                       "  static constexpr int kWordBytes = ",
                       config.word_bytes, ";\n};\n#include \"copy_rows/copy_rows.cuh\"\n")};
}

}  // namespace jax_fp8gemm
