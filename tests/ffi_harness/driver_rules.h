// What a driver refuses, as the CUDA driver API documents it for sm_90.

#ifndef JAX_FP8GEMM_TESTS_DRIVER_RULES_H_
#define JAX_FP8GEMM_TESTS_DRIVER_RULES_H_

#include <cstdint>
#include <string>

#include "fake_driver.h"

namespace fake {

constexpr int kMaxDynamicSmemBytes = 227 * 1024;  // opt-in
constexpr int kDefaultSmemBytes = 48 * 1024;      // without opting in

// What a "cubin" of fake_nvrtc.cc says of its kernel.
struct KernelFacts {
  std::string name;
  unsigned max_threads = 0;  // __launch_bounds__
  unsigned registers = 0;    // of a thread
  unsigned param_bytes = 0;
};

// Reads them. False if the image is none of fake_nvrtc.cc.
bool ParseImage(const char* image, KernelFacts* facts);

// "", or the rule of cuTensorMapEncodeTiled that is broken.
std::string BrokenTensorMapRule(const void* destination, const TensorMap& map);

// "", or the rule of a launch that is broken. smem_limit: what the kernel was allowed.
std::string BrokenLaunchRule(const Launch& launch, const KernelFacts& kernel, int smem_limit);

}  // namespace fake

#endif  // JAX_FP8GEMM_TESTS_DRIVER_RULES_H_
