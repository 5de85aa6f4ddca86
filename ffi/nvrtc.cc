#include "nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <system_error>
#include <type_traits>

#include "errors.h"

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
    if (file.path().filename().string().rfind("libnvrtc-builtins.so", 0) == 0) {
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

// nullptr if `path` is not usable, with the reason in `fault`.
std::unique_ptr<Nvrtc> Open(const std::string& path, std::string* fault) {
  if (path.find('/') != std::string::npos) {
    PreloadBuiltins(fs::path(path).parent_path());
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *fault = dlerror();
    return nullptr;
  }
  auto nvrtc = std::make_unique<Nvrtc>();
  const char* missing = nullptr;
  auto load = [&](auto& function, const char* symbol) {
    void* address = dlsym(library, symbol);
    if (address == nullptr) missing = symbol;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  load(nvrtc->nvrtcGetErrorString, "nvrtcGetErrorString");
  load(nvrtc->nvrtcVersion, "nvrtcVersion");
  load(nvrtc->nvrtcCreateProgram, "nvrtcCreateProgram");
  load(nvrtc->nvrtcDestroyProgram, "nvrtcDestroyProgram");
  load(nvrtc->nvrtcCompileProgram, "nvrtcCompileProgram");
  load(nvrtc->nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize");
  load(nvrtc->nvrtcGetProgramLog, "nvrtcGetProgramLog");
  load(nvrtc->nvrtcGetCUBINSize, "nvrtcGetCUBINSize");
  load(nvrtc->nvrtcGetCUBIN, "nvrtcGetCUBIN");
  if (missing != nullptr) {
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
  return nvrtc;
}

// Adds what ptxas -v reports of each function: registers are the largest, spills the sum.
void ParseLog(Cubin* cubin) {
  size_t begin = 0;
  while (begin < cubin->log.size()) {
    size_t end = std::min(cubin->log.find('\n', begin), cubin->log.size());
    const std::string line = cubin->log.substr(begin, end - begin);
    begin = end + 1;
    int registers, stores, loads;
    if (size_t at = line.find("Used ");
        at != std::string::npos &&
        std::sscanf(line.c_str() + at, "Used %d registers", &registers) == 1) {
      cubin->registers = std::max(cubin->registers, registers);
    }
    if (size_t at = line.find("bytes stack frame, ");
        at != std::string::npos &&
        std::sscanf(line.c_str() + at, "bytes stack frame, %d bytes spill stores, %d bytes",
                    &stores, &loads) == 2) {
      cubin->spill_bytes += stores + loads;
    }
  }
}

// Destroys a program, whichever way its scope is left.
struct Program {
  explicit Program(const Nvrtc& nvrtc) : nvrtc(nvrtc) {}
  Program(const Program&) = delete;
  ~Program() {
    if (handle != nullptr) nvrtc.nvrtcDestroyProgram(&handle);
  }
  const Nvrtc& nvrtc;
  nvrtcProgram handle = nullptr;
};

}  // namespace

const std::vector<std::string>& NvrtcOptions() {
  static const std::vector<std::string>& options = *new std::vector<std::string>{
      "-std=c++20",                 // designated initialisers
      "--gpu-architecture=sm_90a",  // SASS, not PTX: an older driver refuses a newer PTX version
      "-default-device",            // functions need no __device__
      "--ptxas-options=-v",         // registers and spills in the program log
  };
  return options;
}

ffi::ErrorOr<const Nvrtc*> OpenNvrtc(const std::vector<std::string>& candidates) {
  static std::mutex& mutex = *new std::mutex();
  static std::map<std::string, std::unique_ptr<Nvrtc>>& opened =
      *new std::map<std::string, std::unique_ptr<Nvrtc>>();
  std::lock_guard<std::mutex> lock(mutex);
  std::string faults;
  for (const std::string& candidate : candidates) {
    std::unique_ptr<Nvrtc>& nvrtc = opened[candidate];
    std::string fault;
    if (nvrtc == nullptr) nvrtc = Open(candidate, &fault);
    if (nvrtc != nullptr) return nvrtc.get();
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

ffi::ErrorOr<Cubin> CompileCubin(const Nvrtc& nvrtc, const KernelSource& source,
                                 const Headers& headers) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<const char*> header_texts, header_names, options;
  for (const auto& [name, text] : headers) {
    header_names.push_back(name.c_str());
    header_texts.push_back(text.c_str());
  }
  for (const std::string& option : NvrtcOptions()) options.push_back(option.c_str());

  Program program(nvrtc);
  nvrtcResult result = nvrtc.nvrtcCreateProgram(
      &program.handle, source.text.c_str(), (source.name + ".cu").c_str(),
      static_cast<int>(headers.size()), header_texts.data(), header_names.data());
  if (result != 0) {
    return Internal("nvrtcCreateProgram failed: ", nvrtc.nvrtcGetErrorString(result));
  }
  result =
      nvrtc.nvrtcCompileProgram(program.handle, static_cast<int>(options.size()), options.data());
  Cubin cubin;
  cubin.name = source.name;
  size_t bytes = 0;
  if (nvrtc.nvrtcGetProgramLogSize(program.handle, &bytes) == 0 && bytes > 1) {
    cubin.log.resize(bytes);
    nvrtc.nvrtcGetProgramLog(program.handle, cubin.log.data());
    cubin.log.resize(std::strlen(cubin.log.c_str()));  // it ends in one zero or two
  }
  if (result != 0) {
    return Internal("NVRTC ", nvrtc.major, ".", nvrtc.minor, " cannot compile ", source.name, ": ",
                    nvrtc.nvrtcGetErrorString(result), "\n", cubin.log);
  }
  result = nvrtc.nvrtcGetCUBINSize(program.handle, &bytes);
  if (result == 0) {
    cubin.image.resize(bytes);
    result = nvrtc.nvrtcGetCUBIN(program.handle, cubin.image.data());
  }
  if (result != 0) {
    return Internal("nvrtcGetCUBIN failed: ", nvrtc.nvrtcGetErrorString(result));
  }
  ParseLog(&cubin);
  cubin.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return cubin;
}

}  // namespace jax_fp8gemm
