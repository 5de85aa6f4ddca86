// The fake driver's devices, libraries and kernels, and what libcuda.so.1 exports.

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "fake_driver_state.h"

namespace fake {
namespace {

int Init(unsigned) {
  WaitInInit();
  FAKE_ENTER("cuInit");
  return kSuccess;
}

int DriverGetVersion(int* version) {
  FAKE_ENTER("cuDriverGetVersion");
  *version = 13000;
  return kSuccess;
}

// These two do not fail: they describe failures.
int GetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return kSuccess;
}

int GetErrorString(int, const char** text) {
  *text = "the fake driver was told to fail";
  return kSuccess;
}

int DeviceGetCount(int* count) {
  FAKE_ENTER("cuDeviceGetCount");
  for (*count = 0; IsDevice(*count);) ++*count;
  return kSuccess;
}

int DeviceGet(int* device, int ordinal) {
  FAKE_ENTER("cuDeviceGet");
  if (!IsDevice(ordinal)) return Refuse("cuDeviceGet: no such device");
  *device = ordinal;
  return kSuccess;
}

int DeviceGetName(char* name, int length, int device) {
  FAKE_ENTER("cuDeviceGetName");
  if (!IsDevice(device)) return Refuse("cuDeviceGetName: no such device");
  std::snprintf(name, length, "Fake H200");
  return kSuccess;
}

int DeviceGetAttribute(int* value, int attribute, int device) {
  FAKE_ENTER("cuDeviceGetAttribute");
  // Multiprocessors; major and minor of the compute capability.
  static const std::map<int, int> values = {{16, 132}, {75, 9}, {76, 0}};
  const auto found = values.find(attribute);
  if (found == values.end() || !IsDevice(device)) {
    return Refuse("cuDeviceGetAttribute: a device or attribute that the fake driver has not");
  }
  *value = found->second;
  return kSuccess;
}

int CtxGetDevice(int* device) {
  FAKE_ENTER("cuCtxGetDevice");
  if (CurrentDevice() < 0) return kInvalidContext;
  *device = CurrentDevice();
  return kSuccess;
}

int LibraryLoadData(void** library, const void* code, void*, void**, unsigned, void*, void**,
                    unsigned) {
  FAKE_ENTER("cuLibraryLoadData");
  auto kernel = std::make_unique<Kernel>();
  if (code == nullptr || !ParseImage(static_cast<const char*>(code), &kernel->facts)) {
    return Refuse("cuLibraryLoadData: not a cubin");
  }
  std::lock_guard<std::mutex> lock(GetState().mutex);
  ++GetState().loads[kernel->facts.name];
  *library = kernel.get();
  GetState().kernels.insert(kernel.release());
  return kSuccess;
}

int LibraryGetKernel(void** kernel, void* library, const char* name) {
  FAKE_ENTER("cuLibraryGetKernel");
  Kernel* found = FindKernel(library);
  if (found == nullptr) return Refuse("cuLibraryGetKernel: not a library", kInvalidHandle);
  if (found->facts.name != name) return Refuse("cuLibraryGetKernel: no such kernel", kNotFound);
  *kernel = found;
  return kSuccess;
}

int KernelGetFunction(void** function, void* kernel) {
  FAKE_ENTER("cuKernelGetFunction");
  Kernel* found = FindKernel(kernel);
  if (found == nullptr) return Refuse("cuKernelGetFunction: not a kernel", kInvalidHandle);
  if (CurrentDevice() < 0) return kInvalidContext;
  std::lock_guard<std::mutex> lock(GetState().mutex);
  found->loaded_on.insert(CurrentDevice());
  *function = found;
  return kSuccess;
}

int KernelSetAttribute(int attribute, int value, void* kernel, int device) {
  FAKE_ENTER("cuKernelSetAttribute");
  constexpr int kMaxDynamicSharedSizeBytes = 8;
  Kernel* found = FindKernel(kernel);
  if (found == nullptr) return Refuse("cuKernelSetAttribute: not a kernel", kInvalidHandle);
  if (attribute != kMaxDynamicSharedSizeBytes || !IsDevice(device) || value < 0 ||
      value > kMaxDynamicSmemBytes) {
    return Refuse("cuKernelSetAttribute: dynamic shared memory must be in 0..232448");
  }
  std::lock_guard<std::mutex> lock(GetState().mutex);
  found->smem_limits[device] = value;
  return kSuccess;
}

template <typename Function>
void* Address(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

void* DeviceFunction(const std::string& name) {
  static const std::map<std::string, void*> functions = {
      {"cuInit", Address(Init)},
      {"cuDriverGetVersion", Address(DriverGetVersion)},
      {"cuGetErrorName", Address(GetErrorName)},
      {"cuGetErrorString", Address(GetErrorString)},
      {"cuDeviceGetCount", Address(DeviceGetCount)},
      {"cuDeviceGet", Address(DeviceGet)},
      {"cuDeviceGetName", Address(DeviceGetName)},
      {"cuDeviceGetAttribute", Address(DeviceGetAttribute)},
      {"cuCtxGetDevice", Address(CtxGetDevice)},
      {"cuLibraryLoadData", Address(LibraryLoadData)},
      {"cuLibraryGetKernel", Address(LibraryGetKernel)},
      {"cuKernelGetFunction", Address(KernelGetFunction)},
      {"cuKernelSetAttribute", Address(KernelSetAttribute)},
  };
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

}  // namespace fake

// The way to everything else.
extern "C" int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t,
                                   int* status) {
  *function = nullptr;
  *status = 1;  // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
  FAKE_ENTER("cuGetProcAddress");
  *function = fake::DeviceFunction(symbol);
  if (*function == nullptr) *function = fake::LaunchFunction(symbol);
  if (*function == nullptr) return fake::kNotFound;
  *status = 0;
  return fake::kSuccess;
}
