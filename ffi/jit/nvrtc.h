// NVRTC, found and opened at run time. Needs no GPU and no CUDA headers.

#ifndef JAX_FP8GEMM_JIT_NVRTC_H_
#define JAX_FP8GEMM_JIT_NVRTC_H_

#include <cstddef>
#include <string>
#include <vector>

#include "errors.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

typedef int nvrtcResult;
typedef struct _nvrtcProgram* nvrtcProgram;

struct Nvrtc {
  std::string path;
  std::string fingerprint;  // of the file, when it was opened: an update may put another there
  int major = 0;
  int minor = 0;
  const char* (*nvrtcGetErrorString)(nvrtcResult result);
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram* program, const char* text, const char* name,
                                    int num_headers, const char* const* headers,
                                    const char* const* include_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram* program);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram program, int num_options,
                                     const char* const* options);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram program, size_t* bytes);
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram program, char* log);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram program, size_t* bytes);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram program, char* cubin);
};

// Opens the first candidate that works and is new enough. A candidate is a path, or a soname for
// the linker to find; behind a path must be a regular file. The library stays open. The error lists
// every candidate with its fault.
ffi::ErrorOr<const Nvrtc*> OpenNvrtc(const std::vector<std::string>& candidates);

// The candidate that OpenNvrtc would most likely choose, without opening it: the first that exists
// as a file; "" if only sonames are left.
std::string FirstNvrtcFile(const std::vector<std::string>& candidates);

// What tells one build of NVRTC from another without opening it (12 ms): its file name, its size
// and its first page, which holds the linker's build ID. "" if it cannot be read.
std::string NvrtcFingerprint(const std::string& path);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_NVRTC_H_
