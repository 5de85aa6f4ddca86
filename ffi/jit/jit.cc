#include "jit/jit.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "errors.h"
#include "jit/nvrtc.h"
#include "jit/read_or_compile.h"

namespace jax_fp8gemm {
namespace {

constexpr int kMaxDevices = 64;

// A kernel, from its first request on. `mutex` guards compiling and loading; what Execute reads is
// atomic.
struct Entry {
  explicit Entry(std::string text) : text(std::move(text)) {
    for (std::atomic<int>& bytes : smem_bytes) bytes = -1;
  }

  const std::string text;
  std::mutex mutex;
  std::shared_ptr<const Cubin> cubin;
  CUlibrary library = nullptr;  // loaded, even if its kernel could not be got
  std::atomic<CUkernel> kernel{nullptr};
  std::atomic<int> smem_bytes[kMaxDevices];  // allowed so far, by device; -1: not loaded there
};

struct Jit {
  std::atomic<uint64_t> generation{0};
  std::shared_mutex mutex;
  std::shared_ptr<JitSetup> setup = std::make_shared<JitSetup>(JitOptions());
  std::unordered_map<std::string, std::shared_ptr<Entry>> entries;  // by kernel name
};

// Never destroyed: handlers may run until the process ends. Made when the library is loaded: the
// guard of a local static could be taken by another thread at a fork.
std::atomic<Jit*> jit_of_process{new Jit()};

Jit& GetJit() { return *jit_of_process.load(std::memory_order_acquire); }

std::shared_ptr<JitSetup> GetSetup() {
  Jit& jit = GetJit();
  std::shared_lock<std::shared_mutex> lock(jit.mutex);
  return jit.setup;
}

// Other threads may hold any of the locks at a fork, and are not in the child: that begins with the
// same options and an empty memory.
thread_local std::shared_ptr<const JitSetup> setup_at_fork;

void BeforeFork() { setup_at_fork = GetSetup(); }

void InParent() { setup_at_fork.reset(); }

void InChild() {
  auto* jit = new Jit();
  jit->setup = std::make_shared<JitSetup>(setup_at_fork->options);
  // Another one, so that this thread forgets what it got lately.
  jit->generation = GetJit().generation + 1;
  jit_of_process = jit;
}

[[maybe_unused]] const int registered = pthread_atfork(BeforeFork, InParent, InChild);

}  // namespace

void Configure(JitOptions options) {
  Jit& jit = GetJit();
  std::unique_lock<std::shared_mutex> lock(jit.mutex);
  jit.setup = std::make_shared<JitSetup>(std::move(options));
  jit.entries.clear();
  ++jit.generation;
}

void DisableDiskCache() {
  Jit& jit = GetJit();
  std::unique_lock<std::shared_mutex> lock(jit.mutex);
  JitOptions options = jit.setup->options;
  options.cache_dir.clear();
  jit.setup = std::make_shared<JitSetup>(std::move(options));
}

uint64_t JitGeneration() { return GetJit().generation.load(std::memory_order_acquire); }

ffi::ErrorOr<std::shared_ptr<const Cubin>> GetOrCompile(const KernelSource& source) {
  Jit& jit = GetJit();
  std::shared_ptr<Entry> entry;
  std::shared_ptr<JitSetup> setup;
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
    ReportKernel(setup->options, *entry->cubin, "in memory", 0);
    return entry->cubin;
  }
  FFI_ASSIGN_OR_RETURN(Cubin cubin, ReadOrCompile(source, *setup));
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
  if (device >= kMaxDevices) {
    return Internal("jit: a device's number must be below ", kMaxDevices, "; got ", device);
  }
  if (entry == nullptr) return NotFound("jit: kernel must be compiled first; got ", name);
  if (entry->smem_bytes[device].load(std::memory_order_acquire) >= dynamic_smem_bytes) {
    if (CUkernel kernel = entry->kernel.load(std::memory_order_acquire)) return kernel;
  }
  // First time on this device: in Prepare, never in Execute.
  std::lock_guard<std::mutex> lock(entry->mutex);
  if (entry->cubin == nullptr) {
    return NotFound("jit: kernel must be compiled first; got ", name);
  }
  CUkernel kernel = entry->kernel.load(std::memory_order_acquire);
  if (kernel == nullptr) {
    if (entry->library == nullptr) {
      CU_RETURN_IF_ERROR(driver->cuLibraryLoadData(&entry->library, entry->cubin->image.data(),
                                                   nullptr, nullptr, 0, nullptr, nullptr, 0));
    }
    CU_RETURN_IF_ERROR(driver->cuLibraryGetKernel(&kernel, entry->library, name.c_str()));
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
  const std::shared_ptr<JitSetup> setup = GetSetup();
  FFI_ASSIGN_OR_RETURN(const Nvrtc* nvrtc, OpenNvrtc(setup->options.nvrtc_paths));
  return NvrtcInfo{nvrtc->path, nvrtc->major, nvrtc->minor};
}

}  // namespace jax_fp8gemm
