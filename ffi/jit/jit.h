// Run-time compilation: CUDA C++ text -> NVRTC -> cubin -> kernel handle, cached in memory and on
// disk.
//
// Who calls what:
//   Instantiate  GetOrCompile   memory, then disk (a few ms), then NVRTC (0.4-1.2 s)
//   Prepare      GetKernel      loads the cubin into the driver, once a process; compiles it first
//                               if nothing was instantiated (config_kernel.h)
//   Execute      GetKernel      a look-up; never compiles, never loads
// All of it is thread-safe: XLA calls handlers of several devices and executables at once.

#ifndef JAX_FP8GEMM_JIT_JIT_H_
#define JAX_FP8GEMM_JIT_JIT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "driver/driver.h"
#include "errors.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// One translation unit that defines one kernel.
struct KernelSource {
  std::string name;  // extern "C" symbol; unique to `text`: it carries the whole config
  std::string text;  // may #include any file below the source folder, by its path from there
};

// A compiled kernel.
struct Cubin {
  std::string name;
  std::vector<char> image;
  int registers = 0;
  int spill_bytes = 0;  // spill stores + spill loads
  double seconds = 0;   // time NVRTC took
  bool from_disk = false;
  std::string log;  // NVRTC's program log, with ptxas -v
};

struct JitOptions {
  std::string source_dir;                // holds the .cuh files, in folders
  std::string cache_dir;                 // empty: no disk cache
  std::vector<std::string> nvrtc_paths;  // candidates, the first that opens wins
  bool is_debug = false;                 // report each kernel on stderr
  std::string dump_dir;                  // empty: no dump of source, cubin, SASS
};

// Sets the options and forgets the memory cache. Loaded kernels stay loaded.
void Configure(JitOptions options);

// Goes on without a disk cache; what is in memory stays.
void DisableDiskCache();

// The cubin of `source`: from memory, from disk, or compiled. Threads that ask for the same kernel
// compile it once; a failure is reported to each caller and not remembered.
ffi::ErrorOr<std::shared_ptr<const Cubin>> GetOrCompile(const KernelSource& source);

// The kernel that GetOrCompile made under this name, loaded, with `dynamic_smem_bytes` allowed on
// the device of the current context. NotFound if GetOrCompile made none, or if Configure has
// forgotten it since.
ffi::ErrorOr<CUkernel> GetKernel(const std::string& name, int dynamic_smem_bytes);

// How often Configure was called.
uint64_t JitGeneration();

// The NVRTC that GetOrCompile would use.
struct NvrtcInfo {
  std::string path;
  int major = 0;
  int minor = 0;
};

// Opens NVRTC; an error lists every candidate with what is wrong with it.
ffi::ErrorOr<NvrtcInfo> GetNvrtcInfo();

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_JIT_JIT_H_
