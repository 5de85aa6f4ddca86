// The gated activations that kernels compile in, as attributes name them.

#ifndef JAX_FP8GEMM_ACTIVATION_H_
#define JAX_FP8GEMM_ACTIVATION_H_

#include <cstdint>
#include <string>

namespace jax_fp8gemm {

// The kernels have the same enum in cuda/quantize/activation.cuh.
enum ActivationKind : int32_t { kSilu, kGelu, kGeluTanh, kRelu2, kClampedSwiglu };

struct Activation {
  int32_t kind;  // an ActivationKind
  // Of kClampedSwiglu: the constants of swiglu.cuh, as bits of f32. Otherwise 0.
  int32_t limit, alpha, up_offset;
};

// What HasRightConstants says, for errors.
constexpr const char* kConstantsRule =
    "limit, alpha and up_offset must be bits of finite f32, limit above 0, with activation 4, and "
    "0 without";

bool IsActivation(int32_t kind);

// Whether an activation has constants if and only if its kind takes them, and they are finite.
bool HasRightConstants(const Activation& activation);

// The constants, for errors: "limit 1, alpha 2, up_offset 3".
std::string ConstantsText(const Activation& activation);

// What the name of a kernel says of the activation: "" for kSilu, otherwise with a "_" behind it.
std::string ActivationName(const Activation& activation);

// The members that cuda/quantize/activation.cuh reads of a kernel's Config.
std::string ActivationMembers(const Activation& activation);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_ACTIVATION_H_
