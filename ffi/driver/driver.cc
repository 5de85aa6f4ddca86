#include "driver/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "members.h"

namespace jax_fp8gemm {
namespace {

// First CUDA with cuLibrary*, tensor maps and cuGetProcAddress_v2.
constexpr int kMinVersion = 12000;

using GetProcAddress = CUresult (*)(const char* symbol, void** function, int cuda_version,
                                    uint64_t flags, int* status);

// What DriverError may use while GetDriver() is still being initialised.
std::atomic<const Driver*> opened_driver{nullptr};

ffi::ErrorOr<Driver*> Open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return FailedPrecondition("no NVIDIA driver: cannot open libcuda.so.1");
  }
  auto get_proc_address = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get_proc_address == nullptr) {
    return FailedPrecondition("the NVIDIA driver must support CUDA 12.0 or newer; it has no ",
                              "cuGetProcAddress_v2. Update the driver.");
  }
  auto opened = std::make_unique<Driver>();
  Driver* driver = opened.get();
  const auto find = [&](const char* name) {
    void* address = nullptr;
    int status = 0;
    const CUresult result = get_proc_address(name, &address, kMinVersion, 0, &status);
    return result == CUDA_SUCCESS ? address : nullptr;
  };
  const std::string missing =
      SetFunctions<&Driver::cuInit, &Driver::cuDriverGetVersion, &Driver::cuGetErrorName,
                   &Driver::cuGetErrorString, &Driver::cuDeviceGetCount, &Driver::cuDeviceGet,
                   &Driver::cuDeviceGetName, &Driver::cuDeviceGetAttribute, &Driver::cuCtxGetDevice,
                   &Driver::cuLibraryLoadData, &Driver::cuLibraryGetKernel,
                   &Driver::cuKernelGetFunction, &Driver::cuKernelSetAttribute,
                   &Driver::cuLaunchKernelEx, &Driver::cuOccupancyMaxActiveClusters,
                   &Driver::cuMemsetD32Async, &Driver::cuTensorMapEncodeTiled>(*driver, find);
  if (!missing.empty()) {
    return FailedPrecondition("the NVIDIA driver must support CUDA 12.0 or newer; it has no ",
                              missing, ". Update the driver.");
  }
  // Never deleted: handlers may run until the process ends.
  opened_driver = opened.release();
  if (const CUresult result = driver->cuInit(0); result != CUDA_SUCCESS) {
    const char* name = nullptr;
    driver->cuGetErrorName(result, &name);
    return FailedPrecondition("needs a GPU that the NVIDIA driver can use; cuInit gave ",
                              name ? name : "a CUDA error", " (", result, ")");
  }
  CU_RETURN_IF_ERROR(driver->cuDriverGetVersion(&driver->version));
  return driver;
}

// Of GetDriver(). Never deleted, and read without a lock.
std::atomic<const ffi::ErrorOr<Driver*>*> first_answer{nullptr};

// Held while the driver is opened. The child of a fork gets another one: the thread that holds it
// may not be there. A local static would not do, for the same reason.
std::atomic<std::mutex*> opening{new std::mutex()};

[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { opening = new std::mutex(); });

}  // namespace

ffi::ErrorOr<const Driver*> GetDriver() {
  if (first_answer == nullptr) {
    std::lock_guard<std::mutex> lock(*opening.load());
    if (first_answer == nullptr) first_answer = new ffi::ErrorOr<Driver*>(Open());
  }
  const ffi::ErrorOr<Driver*>& answer = *first_answer.load();
  if (answer.has_error()) return Failure(answer.error());
  return *answer;
}

ffi::ErrorOr<CUdevice> CurrentDevice(const Driver& driver) {
  CUdevice device;
  CU_RETURN_IF_ERROR(driver.cuCtxGetDevice(&device));
  return device;
}

ffi::ErrorOr<int> NumSms(const Driver& driver, CUdevice device) {
  int num_sms;
  CU_RETURN_IF_ERROR(
      driver.cuDeviceGetAttribute(&num_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
  return num_sms;
}

ffi::Error DriverError(const char* expr, const char* file, int line, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (const Driver* driver = opened_driver) {
    driver->cuGetErrorName(result, &name);
    driver->cuGetErrorString(result, &text);
  }
  const char* slash = std::strrchr(file, '/');
  return Internal(slash ? slash + 1 : file, ":", line, ": ", expr,
                  " failed: ", name ? name : "CUDA error", " (", result, ")", text ? ": " : "",
                  text ? text : "");
}

namespace {

// The driver's form of `dims`, which points to itself.
struct LaunchConfig {
  CUlaunchAttribute cluster = {};
  CUlaunchConfig config = {};

  LaunchConfig(const LaunchDims& dims, CUstream stream) {
    config.gridDimX = dims.grid_x;
    config.gridDimY = dims.grid_y;
    config.gridDimZ = 1;
    config.blockDimX = dims.block_x;
    config.blockDimY = 1;
    config.blockDimZ = 1;
    config.sharedMemBytes = dims.dynamic_smem_bytes;
    config.hStream = stream;
    config.attrs = &cluster;
    if (dims.cluster_x > 1) {
      cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      cluster.value.clusterDim = {dims.cluster_x, 1, 1};
      config.numAttrs = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

}  // namespace

ffi::ErrorOr<int> CountActiveClusters(const Driver& driver, CUkernel kernel,
                                      const LaunchDims& dims) {
  const LaunchConfig launch(dims, nullptr);
  int num_clusters;
  CU_RETURN_IF_ERROR(driver.cuOccupancyMaxActiveClusters(
      &num_clusters, reinterpret_cast<CUfunction>(kernel), &launch.config));
  return num_clusters;
}

ffi::Error LaunchKernel(const Driver& driver, CUkernel kernel, const LaunchDims& dims,
                        CUstream stream, void** params) {
  const LaunchConfig launch(dims, stream);
  CU_RETURN_IF_ERROR(driver.cuLaunchKernelEx(&launch.config, reinterpret_cast<CUfunction>(kernel),
                                             params, nullptr));
  return ffi::Error::Success();
}

}  // namespace jax_fp8gemm
