#include "activation.h"

#include "errors.h"

namespace jax_fp8gemm {
namespace {

constexpr const char* kNames[] = {"silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"};

bool IsFinite(int32_t bits) {
  constexpr int32_t kMagnitude = 0x7fffffff, kInf = 0x7f800000;
  return (bits & kMagnitude) < kInf;
}

// As names and sources of kernels have the bits of a constant.
uint32_t Bits(int32_t constant) { return static_cast<uint32_t>(constant); }

}  // namespace

bool IsActivation(int32_t kind) { return kSilu <= kind && kind <= kClampedSwiglu; }

bool HasRightConstants(const Activation& a) {
  if (a.kind != kClampedSwiglu) return a.limit == 0 && a.alpha == 0 && a.up_offset == 0;
  return a.limit > 0 && IsFinite(a.limit) && IsFinite(a.alpha) && IsFinite(a.up_offset);
}

std::string ConstantsText(const Activation& a) {
  return StrCat("limit ", a.limit, ", alpha ", a.alpha, ", up_offset ", a.up_offset);
}

std::string ActivationName(const Activation& a) {
  if (!IsActivation(a.kind)) return "bad_activation_";
  if (a.kind == kSilu) return "";
  const std::string name = StrCat(kNames[a.kind], "_");
  if (a.kind != kClampedSwiglu) return name;
  return StrCat(name, Bits(a.limit), "_", Bits(a.alpha), "_", Bits(a.up_offset), "_");
}

std::string ActivationMembers(const Activation& a) {
  return StrCat("  static constexpr int kActivation = ", a.kind,
                ";\n  static constexpr unsigned kLimit = ", Bits(a.limit),
                ";\n  static constexpr unsigned kAlpha = ", Bits(a.alpha),
                ";\n  static constexpr unsigned kUpOffset = ", Bits(a.up_offset), ";\n");
}

}  // namespace jax_fp8gemm
