// Run-time compilation: CUDA C++ text -> NVRTC -> sm_90a cubin -> kernel handle, cached in memory
// and on disk.
//
// Who calls what:
//   Instantiate  GetOrCompile   memory, then disk (a few ms), then NVRTC (0.4-1.2 s)
//   Prepare      PrepareKernel  loads the cubin into the driver, once a process; compiles it if
//                               nothing was instantiated
//   Execute      GetKernel      a look-up; never compiles, never loads
// All of it is thread-safe: XLA calls handlers of several devices and executables at once.

#ifndef JAX_FP8GEMM_JIT_JIT_H_
#define JAX_FP8GEMM_JIT_JIT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
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
// the device of the current context.
ffi::ErrorOr<CUkernel> GetKernel(const std::string& name, int dynamic_smem_bytes);

// How often Configure was called.
uint64_t JitGeneration();

// The same by the config that `name` spells out. Kernels that this thread got lately cost neither a
// lock nor the name, which takes 0.3 us.
template <typename Config>
ffi::ErrorOr<CUkernel> GetKernel(const Config& config, std::string (*name)(const Config&),
                                 int dynamic_smem_bytes) {
  static_assert(std::has_unique_object_representations_v<Config>, "configs are compared by bytes");
  struct Found {
    Config config;
    CUdevice device;
    uint64_t generation;
    CUkernel kernel;
  };
  thread_local std::array<Found, 16> lately = {};
  thread_local size_t oldest = 0;
  FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
  FFI_ASSIGN_OR_RETURN(const CUdevice device, CurrentDevice(*driver));
  const uint64_t generation = JitGeneration();
  for (const Found& found : lately) {
    if (found.kernel != nullptr && found.device == device && found.generation == generation &&
        std::memcmp(&found.config, &config, sizeof(Config)) == 0) {
      return found.kernel;
    }
  }
  FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(name(config), dynamic_smem_bytes));
  lately[oldest] = {config, device, generation, kernel};
  oldest = (oldest + 1) % lately.size();
  return kernel;
}

// Makes GetKernel's kernel ready on the device of the current context. Compiles it too where it
// must: XLA (jaxlib 0.11.2) instantiates nothing of an executable that JAX's compilation cache
// kept.
template <typename Config>
ffi::Error PrepareKernel(const Config& config, std::string (*name)(const Config&),
                         KernelSource (*source)(const Config&), int dynamic_smem_bytes) {
  if (GetKernel(config, name, dynamic_smem_bytes).has_value()) return ffi::Error::Success();
  FFI_ASSIGN_OR_RETURN([[maybe_unused]] auto cubin, GetOrCompile(source(config)));
  FFI_ASSIGN_OR_RETURN([[maybe_unused]] CUkernel kernel,
                       GetKernel(config, name, dynamic_smem_bytes));
  return ffi::Error::Success();
}

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
