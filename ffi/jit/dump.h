// Kernels written out for people to read: source, ptxas log, cubin, SASS.

#ifndef JAX_FP8GEMM_JIT_DUMP_H_
#define JAX_FP8GEMM_JIT_DUMP_H_

#include <string>

#include "jit/jit.h"

namespace jax_fp8gemm {

// Writes <name>.cu, .log, .cubin and, if nvdisasm or cuobjdump is on PATH, .sass into `dump_dir`.
// New files replace those of the same names; `dump_dir` itself may not be a symbolic link.
// Returns "" or what went wrong.
std::string DumpKernel(const std::string& dump_dir, const KernelSource& source, const Cubin& cubin);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_DUMP_H_
