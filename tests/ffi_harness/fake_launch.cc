// The fake driver's work for the device: launches, fills and tensor maps.

#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "fake_driver_state.h"

namespace fake {
namespace {

// As in cuda.h.
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    unsigned cluster[3];
  } value;
};

struct LaunchConfig {
  unsigned grid[3], block[3];
  unsigned dynamic_smem_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// "", or why the attributes are not a cluster along x at most.
std::string ReadCluster(const LaunchConfig& config, unsigned* cluster) {
  constexpr int kClusterDimension = 4;
  *cluster = 1;
  if (config.num_attributes == 0) return "";
  const LaunchAttribute& attribute = config.attributes[0];
  if (config.num_attributes > 1 || attribute.id != kClusterDimension) {
    return "cuLaunchKernelEx: an attribute that the fake driver has not";
  }
  *cluster = attribute.value.cluster[0];
  const bool is_along_x = attribute.value.cluster[1] == 1 && attribute.value.cluster[2] == 1;
  return is_along_x ? "" : "cuLaunchKernelEx: the kernels have clusters along x only";
}

// "", or why this kernel cannot be launched so on the current device.
std::string LaunchFault(const Kernel& kernel, const Launch& launch) {
  std::lock_guard<std::mutex> lock(GetState().mutex);
  if (kernel.loaded_on.count(launch.device) == 0) {
    return "cuLaunchKernelEx: the launch would load the kernel, which Prepare should do";
  }
  const auto limit = kernel.smem_limits.find(launch.device);
  return BrokenLaunchRule(launch, kernel.facts,
                          limit == kernel.smem_limits.end() ? kDefaultSmemBytes : limit->second);
}

int LaunchKernelEx(const LaunchConfig* config, void* function, void** kernel_params, void** extra) {
  FAKE_ENTER("cuLaunchKernelEx");
  const Kernel* kernel = FindKernel(function);
  if (kernel == nullptr) return Refuse("cuLaunchKernelEx: not a kernel", kInvalidHandle);
  if (CurrentDevice() < 0) return kInvalidContext;
  if (config->stream != StreamOf(CurrentDevice())) {
    return Refuse("cuLaunchKernelEx: not a stream of the current context", kInvalidHandle);
  }
  if (kernel_params == nullptr || extra != nullptr) {
    return Refuse("cuLaunchKernelEx: the kernels have one parameter");
  }
  Launch launch = {};
  launch.kernel = kernel->facts.name;
  std::memcpy(launch.grid, config->grid, sizeof(launch.grid));
  std::memcpy(launch.block, config->block, sizeof(launch.block));
  launch.dynamic_smem_bytes = config->dynamic_smem_bytes;
  launch.device = CurrentDevice();
  const auto* params = static_cast<const uint8_t*>(kernel_params[0]);
  launch.params.assign(params, params + kernel->facts.param_bytes);
  std::string fault = ReadCluster(*config, &launch.cluster);
  if (fault.empty()) fault = LaunchFault(*kernel, launch);
  if (!fault.empty()) return Refuse(fault);
  CurrentWork().launches.push_back(std::move(launch));
  return kSuccess;
}

// Of four, fewer than would fill the multiprocessors, as on an H100.
int OccupancyMaxActiveClusters(int* num_clusters, void* function, const LaunchConfig* config) {
  FAKE_ENTER("cuOccupancyMaxActiveClusters");
  const Kernel* kernel = FindKernel(function);
  if (kernel == nullptr) {
    return Refuse("cuOccupancyMaxActiveClusters: not a kernel", kInvalidHandle);
  }
  if (CurrentDevice() < 0) return kInvalidContext;
  unsigned cluster;
  const std::string fault = ReadCluster(*config, &cluster);
  if (!fault.empty()) return Refuse(fault);
  if (config->grid[0] % cluster != 0) {
    return Refuse("cuOccupancyMaxActiveClusters: the grid must be whole clusters");
  }
  *num_clusters = cluster <= 2 ? 132 / cluster : 30;
  return kSuccess;
}

int MemsetD32Async(unsigned long long address, unsigned value, size_t words, void* stream) {
  FAKE_ENTER("cuMemsetD32Async");
  if (CurrentDevice() < 0) return kInvalidContext;
  if (address == 0 || address % 4 != 0) {
    return Refuse("cuMemsetD32Async: address must be a multiple of 4, and not null");
  }
  if (stream != StreamOf(CurrentDevice())) {
    return Refuse("cuMemsetD32Async: not a stream of the current context", kInvalidHandle);
  }
  CurrentWork().memsets.push_back({address, words, value});
  return kSuccess;
}

int TensorMapEncodeTiled(void* destination, int type, uint32_t rank, void* address,
                         const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                         const uint32_t* element_strides, int interleave, int swizzle,
                         int l2_promotion, int oob_fill) {
  FAKE_ENTER("cuTensorMapEncodeTiled");
  if (rank != 2) return Refuse("cuTensorMapEncodeTiled: the fake driver encodes matrices only");
  TensorMap map = {};
  map.kind = TensorMap::kKind;
  map.address = reinterpret_cast<uintptr_t>(address);
  std::memcpy(map.dims, dims, sizeof(map.dims));
  map.row_stride = strides[0];
  std::memcpy(map.box, box, sizeof(map.box));
  std::memcpy(map.element_strides, element_strides, sizeof(map.element_strides));
  map.type = type;
  map.interleave = interleave;
  map.swizzle = swizzle;
  map.l2_promotion = l2_promotion;
  map.oob_fill = oob_fill;
  const std::string fault = BrokenTensorMapRule(destination, map);
  if (!fault.empty()) return Refuse(fault);
  std::memcpy(destination, &map, sizeof(map));
  return kSuccess;
}

}  // namespace

void* LaunchFunction(const std::string& name) {
  if (name == "cuLaunchKernelEx") return reinterpret_cast<void*>(LaunchKernelEx);
  if (name == "cuOccupancyMaxActiveClusters") {
    return reinterpret_cast<void*>(OccupancyMaxActiveClusters);
  }
  if (name == "cuMemsetD32Async") return reinterpret_cast<void*>(MemsetD32Async);
  if (name == "cuTensorMapEncodeTiled") return reinterpret_cast<void*>(TensorMapEncodeTiled);
  return nullptr;
}

}  // namespace fake
