#include "jit.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "disk_cache.h"
#include "dump.h"
#include "errors.h"
#include "nvrtc.h"

namespace jax_fp8gemm {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxDevices = 64;

// What all kernels share: the options, and the folder of sources, read once.
struct Setup {
  explicit Setup(JitOptions options) : options(std::move(options)) {}

  const JitOptions options;
  std::once_flag headers_read;
  Headers headers;
};

// A kernel, from its first request on. `mutex` guards compiling and loading; what Execute reads is
// atomic.
struct Entry {
  explicit Entry(std::string text) : text(std::move(text)) {
    for (std::atomic<int>& bytes : smem_bytes) bytes = -1;
  }

  const std::string text;
  std::mutex mutex;
  std::shared_ptr<const Cubin> cubin;
  std::atomic<CUkernel> kernel{nullptr};
  std::atomic<int> smem_bytes[kMaxDevices];  // allowed so far, by device; -1: not loaded there
};

struct Jit {
  std::atomic<uint64_t> generation{0};
  std::shared_mutex mutex;
  std::shared_ptr<Setup> setup = std::make_shared<Setup>(JitOptions());
  std::unordered_map<std::string, std::shared_ptr<Entry>> entries;  // by kernel name
};

// Never destroyed: handlers may run until the process ends.
Jit& GetJit() {
  static Jit& jit = *new Jit();
  return jit;
}

const Headers& GetHeaders(Setup& setup) {
  std::call_once(setup.headers_read, [&] {
    std::error_code error;
    for (const fs::directory_entry& file :
         fs::directory_iterator(setup.options.source_dir, error)) {
      if (file.path().extension() != ".cuh") continue;
      std::ifstream stream(file.path(), std::ios::binary);
      setup.headers[file.path().filename().string()] =
          std::string((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    }
  });
  return setup.headers;
}

// Everything that the cubin depends on. `nvrtc_path` stands for the compiler.
std::string CacheKey(const KernelSource& source, const Headers& headers,
                     const std::string& nvrtc_path) {
  Hasher hasher;
  hasher.Update(NvrtcFingerprint(nvrtc_path));
  for (const std::string& option : NvrtcOptions()) hasher.Update(option);
  hasher.Update(source.name);
  hasher.Update(source.text);
  for (const auto& [name, text] : headers) {
    hasher.Update(name);
    hasher.Update(text);
  }
  return hasher.Hex();
}

// One line for the user. Once a process, or a full disk would repeat it for each kernel.
void WarnOnce(const std::string& message) {
  static std::once_flag& warned = *new std::once_flag();
  std::call_once(warned,
                 [&] { std::fprintf(stderr, "jax_fp8gemm: warning: %s\n", message.c_str()); });
}

void Report(const Setup& setup, const Cubin& cubin, const char* origin, double seconds) {
  if (!setup.options.is_debug) return;
  std::fprintf(
      stderr, "jax_fp8gemm jit: %s: %s in %.3f s; %d registers, %d spill bytes, %zu byte cubin\n",
      cubin.name.c_str(), origin, seconds, cubin.registers, cubin.spill_bytes, cubin.image.size());
}

// Reads the kernel from disk, or compiles it and writes it there.
ffi::ErrorOr<Cubin> ReadOrCompile(const KernelSource& source, Setup& setup) {
  const auto start = std::chrono::steady_clock::now();
  const JitOptions& options = setup.options;
  const Headers& headers = GetHeaders(setup);
  auto read = [&](const std::string& nvrtc_path) -> std::optional<Cubin> {
    if (options.cache_dir.empty() || nvrtc_path.empty()) return std::nullopt;
    const std::string key = CacheKey(source, headers, nvrtc_path);
    std::optional<Cubin> cubin = ReadEntry(EntryPath(options.cache_dir, source.name, key), key);
    if (cubin.has_value()) {
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      Report(setup, *cubin, "read from disk", elapsed.count());
    }
    return cubin;
  };

  // Without opening NVRTC, if its file is known: a hit costs the reading of a few small files.
  const std::string nvrtc_file = FirstNvrtcFile(options.nvrtc_paths);
  if (std::optional<Cubin> cubin = read(nvrtc_file)) return *std::move(cubin);
  FFI_ASSIGN_OR_RETURN(const Nvrtc* nvrtc, OpenNvrtc(options.nvrtc_paths));
  if (nvrtc->path != nvrtc_file) {
    if (std::optional<Cubin> cubin = read(nvrtc->path)) return *std::move(cubin);
  }
  FFI_ASSIGN_OR_RETURN(Cubin cubin, CompileCubin(*nvrtc, source, headers));
  Report(setup, cubin, StrCat("compiled by NVRTC ", nvrtc->major, ".", nvrtc->minor).c_str(),
         cubin.seconds);
  if (!options.cache_dir.empty()) {
    const std::string key = CacheKey(source, headers, nvrtc->path);
    const std::string fault =
        WriteEntry(EntryPath(options.cache_dir, source.name, key), key, cubin);
    if (!fault.empty()) WarnOnce("kernels are kept in memory only; cannot write " + fault);
  }
  return cubin;
}

}  // namespace

void Configure(JitOptions options) {
  Jit& jit = GetJit();
  std::unique_lock<std::shared_mutex> lock(jit.mutex);
  jit.setup = std::make_shared<Setup>(std::move(options));
  jit.entries.clear();
  ++jit.generation;
}

uint64_t JitGeneration() { return GetJit().generation.load(std::memory_order_acquire); }

ffi::ErrorOr<std::shared_ptr<const Cubin>> GetOrCompile(const KernelSource& source) {
  Jit& jit = GetJit();
  std::shared_ptr<Entry> entry;
  std::shared_ptr<Setup> setup;
  {
    std::unique_lock<std::shared_mutex> lock(jit.mutex);
    setup = jit.setup;
    std::shared_ptr<Entry>& slot = jit.entries[source.name];
    if (slot == nullptr) slot = std::make_shared<Entry>(source.text);
    entry = slot;
  }
  if (entry->text != source.text) {
    return Internal("jit: a kernel name must stand for one source; got two named ", source.name);
  }
  std::lock_guard<std::mutex> lock(entry->mutex);
  if (entry->cubin != nullptr) {
    Report(*setup, *entry->cubin, "in memory", 0);
    return entry->cubin;
  }
  FFI_ASSIGN_OR_RETURN(Cubin cubin, ReadOrCompile(source, *setup));
  if (!setup->options.dump_dir.empty()) {
    const std::string fault = DumpKernel(setup->options.dump_dir, source, cubin);
    if (!fault.empty()) WarnOnce(fault);
  }
  entry->cubin = std::make_shared<const Cubin>(std::move(cubin));
  return entry->cubin;
}

ffi::ErrorOr<CUkernel> GetKernel(const std::string& name, int dynamic_smem_bytes) {
  FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
  FFI_ASSIGN_OR_RETURN(const CUdevice device, CurrentDevice(*driver));
  Jit& jit = GetJit();
  std::shared_ptr<Entry> entry;
  {
    std::shared_lock<std::shared_mutex> lock(jit.mutex);
    if (auto found = jit.entries.find(name); found != jit.entries.end()) entry = found->second;
  }
  if (entry == nullptr || device >= kMaxDevices) {
    return Internal("jit: kernel must be compiled first, on a device below ", kMaxDevices, "; got ",
                    name, " on device ", device);
  }
  if (entry->smem_bytes[device].load(std::memory_order_acquire) >= dynamic_smem_bytes) {
    if (CUkernel kernel = entry->kernel.load(std::memory_order_acquire)) return kernel;
  }
  // First time on this device: in Prepare, never in Execute.
  std::lock_guard<std::mutex> lock(entry->mutex);
  if (entry->cubin == nullptr) {
    return Internal("jit: kernel must be compiled first; got ", name);
  }
  CUkernel kernel = entry->kernel.load(std::memory_order_acquire);
  if (kernel == nullptr) {
    CUlibrary library;
    CU_RETURN_IF_ERROR(driver->cuLibraryLoadData(&library, entry->cubin->image.data(), nullptr,
                                                 nullptr, 0, nullptr, nullptr, 0));
    CU_RETURN_IF_ERROR(driver->cuLibraryGetKernel(&kernel, library, name.c_str()));
    entry->kernel.store(kernel, std::memory_order_release);
  }
  // The driver loads a kernel into a context when that first asks for it. Done at the first launch
  // instead, it could hang behind a running collective, or break a graph capture.
  CUfunction function;
  CU_RETURN_IF_ERROR(driver->cuKernelGetFunction(&function, kernel));
  CU_RETURN_IF_ERROR(driver->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                  dynamic_smem_bytes, kernel, device));
  entry->smem_bytes[device].store(dynamic_smem_bytes, std::memory_order_release);
  return kernel;
}

ffi::ErrorOr<NvrtcInfo> GetNvrtcInfo() {
  std::shared_ptr<Setup> setup;
  {
    std::shared_lock<std::shared_mutex> lock(GetJit().mutex);
    setup = GetJit().setup;
  }
  FFI_ASSIGN_OR_RETURN(const Nvrtc* nvrtc, OpenNvrtc(setup->options.nvrtc_paths));
  return NvrtcInfo{nvrtc->path, nvrtc->major, nvrtc->minor};
}

}  // namespace jax_fp8gemm
