// The Python module jax_fp8gemm._ext: handlers as capsules, and the JIT for use without XLA.
// Errors become RuntimeError; jax_fp8gemm/_ext.pyi states the types.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "copy_rows/copy_rows.h"
#include "copy_rows/copy_rows_config.h"
#include "cpu/quantize_blocks.h"
#include "driver/driver.h"
#include "errors.h"
#include "gemm/gemm.h"
#include "gemm/grouped_gated_gemm.h"
#include "gemm/grouped_gemm.h"
#include "gemm/grouped_wgrad.h"
#include "gemm/quantizing_gemm.h"
#include "jit/jit.h"
#include "jit/nvrtc_use.h"
#include "jit/trusted_folder.h"
#include "python.h"
#include "quantize/quantize.h"
#include "quantize/quantize_config.h"
#include "sum_rows/sum_rows.h"
#include "sum_rows/sum_rows_config.h"
#include "utf8.h"

namespace nb = nanobind;

namespace jax_fp8gemm {
namespace {

// The value, or its error as a Python exception.
template <typename T>
T Unwrap(ffi::ErrorOr<T> result) {
  if (result.has_error()) throw std::runtime_error(result.error().message());
  return *std::move(result);
}

template <typename Handler>
nb::capsule Capsule(Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  const auto bundle = [](auto* instantiate, auto* prepare, auto* execute) {
    nb::dict handlers;
    handlers["instantiate"] = Capsule(instantiate);
    handlers["prepare"] = Capsule(prepare);
    handlers["execute"] = Capsule(execute);
    return handlers;
  };
  nb::dict targets;
  targets["jax_fp8gemm_gemm"] =
      bundle(GemmInstantiateHandler, GemmPrepareHandler, GemmExecuteHandler);
  targets["jax_fp8gemm_grouped_gemm"] =
      bundle(GroupedGemmInstantiateHandler, GroupedGemmPrepareHandler, GroupedGemmExecuteHandler);
  targets["jax_fp8gemm_grouped_gated_gemm"] =
      bundle(GroupedGatedGemmInstantiateHandler, GroupedGatedGemmPrepareHandler,
             GroupedGatedGemmExecuteHandler);
  targets["jax_fp8gemm_grouped_wgrad"] = bundle(
      GroupedWgradInstantiateHandler, GroupedWgradPrepareHandler, GroupedWgradExecuteHandler);
  targets["jax_fp8gemm_quantizing_gemm"] = bundle(
      QuantizingGemmInstantiateHandler, QuantizingGemmPrepareHandler, QuantizingGemmExecuteHandler);
  targets["jax_fp8gemm_copy_rows"] =
      bundle(CopyRowsInstantiateHandler, CopyRowsPrepareHandler, CopyRowsExecuteHandler);
  targets["jax_fp8gemm_sum_rows"] =
      bundle(SumRowsInstantiateHandler, SumRowsPrepareHandler, SumRowsExecuteHandler);
  for (const char* target :
       {"jax_fp8gemm_quantize", "jax_fp8gemm_swiglu_quantize", "jax_fp8gemm_swiglu_grad_quantize",
        "jax_fp8gemm_gather_quantize", "jax_fp8gemm_weighted_swiglu_grad_quantize"}) {
    targets[target] =
        bundle(QuantizeInstantiateHandler, QuantizePrepareHandler, QuantizeExecuteHandler);
  }
  return targets;
}

nb::dict CpuRegistrations() {
  nb::dict targets;
  targets["jax_fp8gemm_quantize_blocks"] = Capsule(QuantizeBlocksHandler);
  return targets;
}

ffi::ErrorOr<nb::dict> DescribeDevice(const Driver& driver, int ordinal) {
  CUdevice device;
  char name[256] = {};
  int major, minor;
  CU_RETURN_IF_ERROR(driver.cuDeviceGet(&device, ordinal));
  CU_RETURN_IF_ERROR(driver.cuDeviceGetName(name, sizeof(name), device));
  CU_RETURN_IF_ERROR(
      driver.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  CU_RETURN_IF_ERROR(
      driver.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
  FFI_ASSIGN_OR_RETURN(const int num_sms, NumSms(driver, device));
  nb::dict info;
  info["name"] = name;
  info["compute_capability"] = nb::make_tuple(major, minor);
  info["num_sms"] = num_sms;
  return info;
}

ffi::ErrorOr<nb::dict> DeviceInfo() {
  FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
  int num_devices = 0;
  CU_RETURN_IF_ERROR(driver->cuDeviceGetCount(&num_devices));
  nb::list devices;
  for (int ordinal = 0; ordinal < num_devices; ++ordinal) {
    FFI_ASSIGN_OR_RETURN(nb::dict device, DescribeDevice(*driver, ordinal));
    devices.append(device);
  }
  nb::dict info;
  info["cuda_version"] = nb::make_tuple(driver->version / 1000, driver->version % 1000 / 10);
  info["devices"] = devices;
  return info;
}

nb::dict Compile(const KernelSource& source) {
  ffi::ErrorOr<std::shared_ptr<const Cubin>> result =
      WithoutGil([&] { return NoThrow([&] { return GetOrCompile(source); }); });
  const std::shared_ptr<const Cubin> cubin = Unwrap(std::move(result));
  nb::dict report;
  report["name"] = cubin->name;
  report["from_disk"] = cubin->from_disk;
  report["registers"] = cubin->registers;
  report["spill_bytes"] = cubin->spill_bytes;
  report["cubin_bytes"] = cubin->image.size();
  report["log"] = Utf8(cubin->log);
  return report;
}

template <typename Config>
nb::dict CompileConfig(const nb::dict& dict) {
  const auto config = ParseConfig<Config>(dict);
  const ffi::Error error = CheckConfig(config);
  if (error.failure()) throw nb::value_error(error.message().c_str());
  return Compile(MakeKernelSource(config));
}

}  // namespace

NB_MODULE(_ext, module) {
  module.attr("XLA_FFI_API_MAJOR") = XLA_FFI_API_MAJOR;
  module.attr("XLA_FFI_API_MINOR") = XLA_FFI_API_MINOR;
  module.def("registrations", &Registrations);
  module.def("cpu_registrations", &CpuRegistrations);
  module.def("device_info", [] { return Unwrap(DeviceInfo()); });
  module.def("nvrtc_info", [] {
    const NvrtcInfo info = Unwrap(GetNvrtcInfo());
    return nb::make_tuple(Utf8(info.path), info.major, info.minor);
  });
  module.def(
      "cache_fault",
      [](nb::handle folder, bool make) {
        std::string fault;
        OpenTrustedFolder(FsEncode(folder), make, &fault);
        return Utf8(fault);
      },
      nb::arg("folder"), nb::kw_only(), nb::arg("make"));
  module.def("disable_disk_cache", &DisableDiskCache);
  // Before anything of the interpreter is taken down: NVRTC may be at work in a daemon thread.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
    nb::gil_scoped_release release;
    EndNvrtcUses();
  }));
  module.def(
      "configure",
      [](nb::handle source_dir, nb::handle cache_dir, nb::iterable nvrtc_paths, bool is_debug,
         nb::handle dump_dir) {
        JitOptions options = {
            FsEncode(source_dir), FsEncode(cache_dir), {}, is_debug, FsEncode(dump_dir)};
        for (nb::handle path : nvrtc_paths) options.nvrtc_paths.push_back(FsEncode(path));
        Configure(std::move(options));
      },
      nb::kw_only(), nb::arg("source_dir"), nb::arg("cache_dir"), nb::arg("nvrtc_paths"),
      nb::arg("is_debug"), nb::arg("dump_dir"));
  module.def("compile_gemm", &CompileConfig<GemmConfig>, nb::arg("config"));
  module.def("compile_copy_rows", &CompileConfig<CopyRowsConfig>, nb::arg("config"));
  module.def("compile_quantize", &CompileConfig<QuantizeConfig>, nb::arg("config"));
  module.def("compile_sum_rows", &CompileConfig<SumRowsConfig>, nb::arg("config"));
}

}  // namespace jax_fp8gemm
