// Text that Python and XLA take: file names, and messages with file names in them, need not be
// UTF-8.

#ifndef JAX_FP8GEMM_UTF8_H_
#define JAX_FP8GEMM_UTF8_H_

#include <string>
#include <string_view>

namespace jax_fp8gemm {

// `text` with each byte that is not part of UTF-8 written as \xNN.
std::string Utf8(std::string_view text);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_UTF8_H_
