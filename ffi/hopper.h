// The GPUs that the kernels are for: Hopper, that is H100 and H200.
//
// An architecture that is added gets a header like this one beside it. What the Python side knows
// is in jax_fp8gemm/_runtime/hopper.py.

#ifndef JAX_FP8GEMM_HOPPER_H_
#define JAX_FP8GEMM_HOPPER_H_

#include <cstdint>

namespace jax_fp8gemm {

// As NVRTC names it. The "a" stands for wgmma and setmaxnreg, which no later architecture has.
constexpr const char* kArchitecture = "sm_90a";

// Shared memory of a CTA that opts in: 227 KiB.
constexpr int64_t kMaxSmemBytes = 232448;

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_HOPPER_H_
