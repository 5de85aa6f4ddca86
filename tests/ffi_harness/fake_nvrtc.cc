#include "fake_nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

constexpr int kSuccess = 0, kInvalidInput = 3, kCompilation = 6;

// 13.0.88 of nvidia-cuda-nvrtc writes its log so.
constexpr char kLog[] =
    "ptxas info    : 0 bytes gmem\n"
    "ptxas info    : Function properties\n"
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 1 barriers\n";

struct State {
  std::mutex mutex;
  std::map<std::string, long> compilations;
  std::string failed_call;
};

State& GetState() {
  static State& state = *new State();
  return state;
}

std::atomic<long> num_programs{0}, num_calls{0}, calls_to_failure{0};
std::atomic<int> compile_microseconds{0};

bool Enter(const char* name) {
  ++num_calls;
  if (calls_to_failure == 0 || --calls_to_failure != 0) return true;
  std::lock_guard<std::mutex> lock(GetState().mutex);
  GetState().failed_call = name;
  return false;
}

// The word behind `label` in `text`, or "".
std::string WordBehind(const std::string& text, const std::string& label) {
  const size_t at = text.find(label);
  if (at == std::string::npos) return "";
  const size_t begin = at + label.size();
  return text.substr(begin, text.find_first_of(" ;\n", begin) - begin);
}

int NumberBehind(const std::string& text, const std::string& label) {
  return std::atoi(WordBehind(text, label).c_str());
}

}  // namespace

#define FAKE_ENTER(name) \
  if (!Enter(name)) return kInvalidInput

struct _nvrtcProgram {
  std::string text;
  std::set<std::string> headers;
  std::string log, image;

  // Fills the image, as the real kernels would be launched; false with the reason in the log.
  bool Compile() {
    const std::string header = WordBehind(text, "#include ");
    if (header.size() < 2 || headers.count(header.substr(1, header.size() - 2)) == 0) {
      log = "error: cannot open source file " + header + "\n";
      return false;
    }
    const bool is_gemm = header.rfind("\"gemm/", 0) == 0;
    const bool is_copy = header == "\"copy_rows/copy_rows.cuh\"";
    // Two more warpgroups quantise lhs where no cluster divides k.
    const bool has_quantizers =
        header == "\"gemm/gemm.cuh\"" && NumberBehind(text, "kQuantizesLhs = ") == 1;
    const int num_warpgroups = NumberBehind(text, "kNumConsumers = ") + (has_quantizers ? 3 : 1);
    const bool is_sum = header == "\"sum_rows/sum_rows.cuh\"";
    const bool is_row = !is_copy && !is_sum && NumberBehind(text, "kMode = ") == 0;
    const int threads = is_gemm ? 128 * num_warpgroups : is_row || is_sum ? 128 : 256;
    // What __launch_bounds__ leaves a thread, as the compiler gives it out.
    const int registers = is_gemm   ? std::min(255, 65536 / threads / 8 * 8)
                          : is_copy ? 40
                          : is_sum  ? 96
                                    : 80;
    const int param_bytes = is_gemm ? 896 : is_copy ? 56 : is_sum ? 48 : 128;
    image = "fake cubin\nkernel " + WordBehind(text, "#define JAX_FP8GEMM_KERNEL ") + "\nthreads " +
            std::to_string(threads) + "\nregisters " + std::to_string(registers) +
            "\nparam_bytes " + std::to_string(param_bytes) + "\n" + text;
    image.push_back('\0');
    log = kLog;
    return true;
  }
};

extern "C" {

const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_FAKE"; }

int nvrtcVersion(int* major, int* minor) {
  FAKE_ENTER("nvrtcVersion");
  *major = 13;
  *minor = 0;
  return kSuccess;
}

int nvrtcCreateProgram(_nvrtcProgram** program, const char* text, const char*, int num_headers,
                       const char* const*, const char* const* names) {
  FAKE_ENTER("nvrtcCreateProgram");
  *program = new _nvrtcProgram{text, {names, names + num_headers}, "", ""};
  ++num_programs;
  return kSuccess;
}

int nvrtcDestroyProgram(_nvrtcProgram** program) {
  // It frees the program even where it is told to fail.
  delete *program;
  *program = nullptr;
  --num_programs;
  FAKE_ENTER("nvrtcDestroyProgram");
  return kSuccess;
}

int nvrtcCompileProgram(_nvrtcProgram* program, int, const char* const*) {
  FAKE_ENTER("nvrtcCompileProgram");
  std::this_thread::sleep_for(std::chrono::microseconds(compile_microseconds));
  if (!program->Compile()) return kCompilation;
  std::lock_guard<std::mutex> lock(GetState().mutex);
  ++GetState().compilations[WordBehind(program->text, "#define JAX_FP8GEMM_KERNEL ")];
  return kSuccess;
}

int nvrtcGetProgramLogSize(_nvrtcProgram* program, size_t* bytes) {
  FAKE_ENTER("nvrtcGetProgramLogSize");
  *bytes = program->log.size() + 1;
  return kSuccess;
}

int nvrtcGetProgramLog(_nvrtcProgram* program, char* log) {
  FAKE_ENTER("nvrtcGetProgramLog");
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}

int nvrtcGetCUBINSize(_nvrtcProgram* program, size_t* bytes) {
  FAKE_ENTER("nvrtcGetCUBINSize");
  *bytes = program->image.size();
  return kSuccess;
}

int nvrtcGetCUBIN(_nvrtcProgram* program, char* image) {
  FAKE_ENTER("nvrtcGetCUBIN");
  std::memcpy(image, program->image.data(), program->image.size());
  return kSuccess;
}

}  // extern "C"

namespace fake {

std::string NvrtcPath() {
  Dl_info info = {};
  dladdr(reinterpret_cast<void*>(nvrtcVersion), &info);
  return info.dli_fname;
}

void SetCompileMicroseconds(int microseconds) { compile_microseconds = microseconds; }

long NumCompilations(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(GetState().mutex);
  return GetState().compilations[kernel];
}

long NumPrograms() { return num_programs; }

long NumNvrtcCalls() { return num_calls; }

void FailNvrtcCall(long nth) {
  {
    std::lock_guard<std::mutex> lock(GetState().mutex);
    GetState().failed_call.clear();
  }
  calls_to_failure = nth;
}

std::string FailedNvrtcCall() {
  std::lock_guard<std::mutex> lock(GetState().mutex);
  return GetState().failed_call;
}

}  // namespace fake
