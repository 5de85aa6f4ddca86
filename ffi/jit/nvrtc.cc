#include "jit/nvrtc.h"

#include <dlfcn.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

#include "errors.h"
#include "jit/nvrtc_use.h"
#include "members.h"

namespace jax_fp8gemm {
namespace {

namespace fs = std::filesystem;

// The oldest NVRTC whose ptxas is known to compile the kernels without spills.
constexpr int kMinMajor = 12;
constexpr int kMinMinor = 4;

// NVRTC 13.0 finds its builtins library only by soname on the search path, which a Python wheel's
// folder is not on. Once opened by full path, it is found by soname.
void PreloadBuiltins(const fs::path& folder) {
  std::error_code error;
  for (const fs::directory_entry& file : fs::directory_iterator(folder, error)) {
    if (file.path().filename().string().rfind("libnvrtc-builtins.so", 0) == 0 &&
        fs::is_regular_file(file.path(), error)) {
      dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
}

// The file that `library` came from: the linker's answer, as a candidate may be a soname.
std::string LoadedPath(void* symbol, const std::string& candidate) {
  Dl_info info;
  if (dladdr(symbol, &info) != 0 && info.dli_fname != nullptr) {
    return info.dli_fname;
  }
  return candidate;
}

// nullptr if `path` is not usable, with the reason in `fault`. A library that is refused stays
// open: what it does when it is closed is not ours to know.
std::unique_ptr<Nvrtc> Open(const std::string& path, std::string* fault) {
  if (path.find('/') != std::string::npos) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);  // behind symbolic links
    if (fs::exists(status) && !fs::is_regular_file(status)) {
      *fault = "is not a regular file";  // dlopen would wait for whoever writes to a FIFO
      return nullptr;
    }
    PreloadBuiltins(fs::path(path).parent_path());
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *fault = dlerror();
    return nullptr;
  }
  auto nvrtc = std::make_unique<Nvrtc>();
  const auto find = [&](const char* name) { return dlsym(library, name); };
  const std::string missing =
      SetFunctions<&Nvrtc::nvrtcGetErrorString, &Nvrtc::nvrtcVersion, &Nvrtc::nvrtcCreateProgram,
                   &Nvrtc::nvrtcDestroyProgram, &Nvrtc::nvrtcCompileProgram,
                   &Nvrtc::nvrtcGetProgramLogSize, &Nvrtc::nvrtcGetProgramLog,
                   &Nvrtc::nvrtcGetCUBINSize, &Nvrtc::nvrtcGetCUBIN>(*nvrtc, find);
  if (!missing.empty()) {
    *fault =
        StrCat("has no ", missing, "; it is not NVRTC, or older than ", kMinMajor, ".", kMinMinor);
    return nullptr;
  }
  nvrtc->nvrtcVersion(&nvrtc->major, &nvrtc->minor);
  if (std::make_pair(nvrtc->major, nvrtc->minor) < std::make_pair(kMinMajor, kMinMinor)) {
    *fault = StrCat("is NVRTC ", nvrtc->major, ".", nvrtc->minor, "; the kernels need ", kMinMajor,
                    ".", kMinMinor, " or newer");
    return nullptr;
  }
  nvrtc->path = LoadedPath(reinterpret_cast<void*>(nvrtc->nvrtcVersion), path);
  nvrtc->fingerprint = NvrtcFingerprint(nvrtc->path);
  return nvrtc;
}

// An answer of OpenNvrtc. Never deleted, and read without a lock, which a fork could leave taken.
struct Opened {
  std::vector<std::string> candidates;
  std::unique_ptr<const Nvrtc> nvrtc;
  const Opened* next;
};

std::atomic<const Opened*> all_opened{nullptr};
std::mutex opening;  // taken by holders of an NvrtcUse alone, so by none at a fork

const Nvrtc* FindOpened(const std::vector<std::string>& candidates) {
  for (const Opened* opened = all_opened; opened != nullptr; opened = opened->next) {
    if (opened->candidates == candidates) return opened->nvrtc.get();
  }
  return nullptr;
}

}  // namespace

ffi::ErrorOr<const Nvrtc*> OpenNvrtc(const std::vector<std::string>& candidates) {
  if (const Nvrtc* nvrtc = FindOpened(candidates)) return nvrtc;
  const NvrtcUse use;
  if (!use.is_granted()) return FailedPrecondition("NVRTC cannot be opened: the process ends");
  std::lock_guard<std::mutex> lock(opening);
  if (const Nvrtc* nvrtc = FindOpened(candidates)) return nvrtc;  // by the thread before
  std::string faults;
  for (const std::string& candidate : candidates) {
    std::string fault;
    if (std::unique_ptr<const Nvrtc> nvrtc = Open(candidate, &fault)) {
      all_opened = new Opened{candidates, std::move(nvrtc), all_opened};
      return all_opened.load()->nvrtc.get();
    }
    faults += StrCat(faults.empty() ? " " : "; ", candidate, ": ", fault);
  }
  return FailedPrecondition("NVRTC ", kMinMajor, ".", kMinMinor, " or newer is needed and none of ",
                            candidates.size(), " candidates works:", faults,
                            ". Install nvidia-cuda-nvrtc, or set JAX_FP8GEMM_NVRTC to the path ",
                            "of libnvrtc.so.");
}

std::string FirstNvrtcFile(const std::vector<std::string>& candidates) {
  std::error_code error;
  for (const std::string& candidate : candidates) {
    if (candidate.find('/') != std::string::npos && fs::is_regular_file(candidate, error)) {
      return candidate;
    }
  }
  return "";
}

std::string NvrtcFingerprint(const std::string& path) {
  std::error_code error;
  const fs::path file = fs::canonical(path, error);
  const auto bytes = error ? 0 : fs::file_size(file, error);
  std::ifstream stream(file, std::ios::binary);
  std::string page(4096, '\0');
  if (error || !stream.read(page.data(), page.size())) return "";
  return StrCat(file.filename().string(), " ", bytes, " ", page);
}

}  // namespace jax_fp8gemm
