// Gets a kernel from the disk cache, or compiles it and writes it there.

#ifndef JAX_FP8GEMM_JIT_READ_OR_COMPILE_H_
#define JAX_FP8GEMM_JIT_READ_OR_COMPILE_H_

#include <mutex>
#include <utility>

#include "jit/compile_cubin.h"
#include "jit/jit.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// What all kernels share: the options, and the sources, which are read once.
struct JitSetup {
  explicit JitSetup(JitOptions options) : options(std::move(options)) {}

  const JitOptions options;
  std::once_flag headers_read;
  Headers headers;
};

// Reads the kernel from disk, or compiles it and writes it there. Dumps it if the options have a
// folder for that.
ffi::ErrorOr<Cubin> ReadOrCompile(const KernelSource& source, JitSetup& setup);

// Says on stderr where a kernel came from, if the options ask for it.
void ReportKernel(const JitOptions& options, const Cubin& cubin, const char* origin,
                  double seconds);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_READ_OR_COMPILE_H_
