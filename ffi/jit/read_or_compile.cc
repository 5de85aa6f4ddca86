#include "jit/read_or_compile.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>

#include "errors.h"
#include "jit/disk_cache.h"
#include "jit/dump.h"
#include "jit/nvrtc.h"

namespace jax_fp8gemm {
namespace {

namespace fs = std::filesystem;

const Headers& GetHeaders(JitSetup& setup) {
  std::call_once(setup.headers_read, [&] {
    std::error_code error;
    const fs::path folder = setup.options.source_dir;
    for (const fs::directory_entry& file : fs::recursive_directory_iterator(folder, error)) {
      if (file.path().extension() != ".cuh") continue;
      std::ifstream stream(file.path(), std::ios::binary);
      setup.headers[file.path().lexically_relative(folder).string()] =
          std::string((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    }
  });
  return setup.headers;
}

// Everything that the cubin depends on. `fingerprint` stands for the compiler. If that is "", no
// entry is known to be that compiler's, and this is "" too.
std::string CacheKey(const KernelSource& source, const Headers& headers,
                     const std::string& fingerprint) {
  if (fingerprint.empty()) return "";
  Hasher hasher;
  hasher.Update(fingerprint);
  for (const std::string& option : NvrtcOptions()) hasher.Update(option);
  hasher.Update(source.name);
  hasher.Update(source.text);
  for (const auto& [name, text] : headers) {
    hasher.Update(name);
    hasher.Update(text);
  }
  return hasher.Hex();
}

// One line for the user. Each `warned` once a process, or a full disk would repeat it for each
// kernel.
void WarnOnce(std::once_flag& warned, const std::string& message) {
  std::call_once(warned,
                 [&] { std::fprintf(stderr, "jax_fp8gemm: warning: %s\n", message.c_str()); });
}

std::once_flag cache_fault_warned, dump_fault_warned;
const char kUncached[] = "kernels are kept in memory only; ";

ffi::ErrorOr<Cubin> FromDiskOrNvrtc(const KernelSource& source, JitSetup& setup) {
  const auto start = std::chrono::steady_clock::now();
  const JitOptions& options = setup.options;
  const Headers& headers = GetHeaders(setup);
  auto read = [&](const std::string& fingerprint) -> std::optional<Cubin> {
    const std::string key = CacheKey(source, headers, fingerprint);
    if (options.cache_dir.empty() || key.empty()) return std::nullopt;
    std::string fault;
    std::optional<Cubin> cubin =
        ReadEntry(EntryPath(options.cache_dir, source.name, key), key, &fault);
    if (!fault.empty()) WarnOnce(cache_fault_warned, kUncached + fault);
    if (cubin.has_value()) {
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      ReportKernel(options, *cubin, "read from disk", elapsed.count());
    }
    return cubin;
  };

  // Without opening NVRTC, if its file is known: a hit costs the reading of a few small files.
  const std::string on_disk = NvrtcFingerprint(FirstNvrtcFile(options.nvrtc_paths));
  if (std::optional<Cubin> cubin = read(on_disk)) return *std::move(cubin);
  FFI_ASSIGN_OR_RETURN(const Nvrtc* nvrtc, OpenNvrtc(options.nvrtc_paths));
  if (nvrtc->fingerprint != on_disk) {
    if (std::optional<Cubin> cubin = read(nvrtc->fingerprint)) return *std::move(cubin);
  }
  FFI_ASSIGN_OR_RETURN(Cubin cubin, CompileCubin(*nvrtc, source, headers));
  ReportKernel(options, cubin,
               StrCat("compiled by NVRTC ", nvrtc->major, ".", nvrtc->minor).c_str(),
               cubin.seconds);
  const std::string key = CacheKey(source, headers, nvrtc->fingerprint);
  if (!options.cache_dir.empty() && !key.empty()) {
    const std::string fault =
        WriteEntry(EntryPath(options.cache_dir, source.name, key), key, cubin);
    if (!fault.empty()) WarnOnce(cache_fault_warned, kUncached + fault);
  }
  return cubin;
}

}  // namespace

void ReportKernel(const JitOptions& options, const Cubin& cubin, const char* origin,
                  double seconds) {
  if (!options.is_debug) return;
  std::fprintf(
      stderr, "jax_fp8gemm jit: %s: %s in %.3f s; %d registers, %d spill bytes, %zu byte cubin\n",
      cubin.name.c_str(), origin, seconds, cubin.registers, cubin.spill_bytes, cubin.image.size());
}

ffi::ErrorOr<Cubin> ReadOrCompile(const KernelSource& source, JitSetup& setup) {
  FFI_ASSIGN_OR_RETURN(Cubin cubin, FromDiskOrNvrtc(source, setup));
  if (!setup.options.dump_dir.empty()) {
    const std::string fault = DumpKernel(setup.options.dump_dir, source, cubin);
    if (!fault.empty()) WarnOnce(dump_fault_warned, fault);
  }
  return cubin;
}

}  // namespace jax_fp8gemm
