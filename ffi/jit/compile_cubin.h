// CUDA C++ text -> cubin for Hopper, by NVRTC.

#ifndef JAX_FP8GEMM_JIT_COMPILE_CUBIN_H_
#define JAX_FP8GEMM_JIT_COMPILE_CUBIN_H_

#include <map>
#include <string>
#include <vector>

#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Path, from the source folder, -> text of everything that a kernel may include.
using Headers = std::map<std::string, std::string>;

// The options of every compilation; part of the cache key.
const std::vector<std::string>& NvrtcOptions();

// Compiles one kernel. The error carries NVRTC's log.
ffi::ErrorOr<Cubin> CompileCubin(const Nvrtc& nvrtc, const KernelSource& source,
                                 const Headers& headers);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_COMPILE_CUBIN_H_
