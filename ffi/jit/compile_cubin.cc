#include "jit/compile_cubin.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "errors.h"
#include "hopper.h"
#include "jit/nvrtc_use.h"

namespace jax_fp8gemm {
namespace {

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

// Never destroyed: threads may compile until the process ends. Made when the library is loaded: the
// guard of a local static could be taken by another thread at a fork.
const std::vector<std::string>& options_of_process = *new std::vector<std::string>{
    "-std=c++20",  // designated initialisers
    // SASS, not PTX: an older driver refuses a newer PTX version.
    StrCat("--gpu-architecture=", kArchitecture),
    "-default-device",     // functions need no __device__
    "--ptxas-options=-v",  // registers and spills in the program log
};

}  // namespace

const std::vector<std::string>& NvrtcOptions() { return options_of_process; }

ffi::ErrorOr<Cubin> CompileCubin(const Nvrtc& nvrtc, const KernelSource& source,
                                 const Headers& headers) {
  const NvrtcUse use;
  if (!use.is_granted()) {
    return FailedPrecondition("kernel ", source.name, " cannot be compiled: the process ends");
  }
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
