// SwiGLU and its gradient of one element, in f32, as it is and clamped.
//
// For gate_up (m, 2 f) = [gate, up] and dh (m, f):
//   sigma = 1 / (1 + exp(-gate))
//   silu  = gate * sigma
//   h     = silu * up                                             (m, f)
//   dgate = (dh * up) * (sigma + silu * (1 - sigma))
//   dup   = dh * silu                             [dgate, dup]    (m, 2 f)
// Every operation is spelled out, so an element has the same bits in every mode.
//
// sigma is 0 or 1 where exp(-gate) or its inverse would not be a normal number, at |gate| > 87.3.
// A gate of -Inf gives NaN, as -Inf * 0 does.
//
// Clamped, with the constants limit, alpha and up_offset of the config:
//   gate' = min(gate, limit)                      up' = min(max(up, -limit), limit)
//   sigma = 1 / (1 + exp(-alpha * gate'))         silu = gate' * sigma
//   h     = silu * (up' + up_offset)
//   dgate = (dh * (up' + up_offset)) * (sigma + alpha * silu * (1 - sigma)), 0 if gate > limit
//   dup   = dh * silu, 0 if |up| > limit
#pragma once

#include "ptx/convert.cuh"

namespace jax_fp8gemm {

struct Sigmoid {
  float sigma;
  float rest;  // 1 - sigma
};

// Both results have a relative error below 2^-20. clamped: in +-88.
__device__ __forceinline__ Sigmoid bounded_sigmoid(float clamped) {
  constexpr float kLog2E = 1.44269502f, kLn2 = 0.693147182f;
  const float power = mul_rn(clamped, -kLog2E);
  // exp(-clamped) = 2^power (1 + lost). NOTE: without `lost`, the roundings of kLog2E and of
  // `power` make an error of 2^-20 at x = -16.
  const float lost = fma_rn(power, -kLn2, -clamped);
  float exp = ex2_approx(power);
  exp = fma_rn(exp, lost, exp);
  const float sigma = rcp_approx(add_rn(1.0f, exp));
  return {sigma, mul_rn(exp, sigma)};  // 1 - sigma would cancel
}

// At one bound exp is 2^126.2, whose inverse rounds to 0. At the other bound exp is 0.
constexpr float kSigmoidBound = 87.5f;

// The clamp loses a NaN, which the product with the gate in silu keeps.
__device__ __forceinline__ Sigmoid sigmoid(float x) {
  return bounded_sigmoid(fminf(fmaxf(x, -kSigmoidBound), kSigmoidBound));
}

enum class SwigluPart { kH, kDgate, kDup };

// One element of a result. kDup does not read up unless it is clamped, and kH does not read dh.
template <SwigluPart kPart>
__device__ __forceinline__ float swiglu(float gate, float up, float dh) {
  const auto [sigma, rest] = sigmoid(gate);
  const float silu = mul_rn(gate, sigma);
  if constexpr (kPart == SwigluPart::kH) {
    return mul_rn(silu, up);
  } else if constexpr (kPart == SwigluPart::kDup) {
    return mul_rn(dh, silu);
  } else {
    return mul_rn(mul_rn(dh, up), fma_rn(silu, rest, sigma));
  }
}

// Comparisons with a NaN are false, so its gradient is that of the formula without bounds.
template <typename Config, SwigluPart kPart>
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float dh) {
  constexpr bool kHasAlpha = Config::kAlpha != 0x3f800000;  // 1
  constexpr bool kHasOffset = Config::kUpOffset != 0;
  const float limit = __uint_as_float(Config::kLimit);
  const float alpha = __uint_as_float(Config::kAlpha);
  const float clamped_gate = min_nan(gate, limit);
  const float clamped_up = min_nan(max_nan(up, -limit), limit);
  const float x = kHasAlpha ? mul_rn(alpha, clamped_gate) : clamped_gate;
  // The limit of a published model is far below the upper bound of sigmoid: one clamp less.
  const bool is_bounded = alpha >= 0.0f && alpha * limit <= kSigmoidBound;
  const auto [sigma, rest] = is_bounded ? bounded_sigmoid(fmaxf(x, -kSigmoidBound)) : sigmoid(x);
  const float silu = mul_rn(clamped_gate, sigma);
  const float offset = __uint_as_float(Config::kUpOffset);
  const float factor = kHasOffset ? add_rn(clamped_up, offset) : clamped_up;
  if constexpr (kPart == SwigluPart::kH) {
    return mul_rn(silu, factor);
  } else if constexpr (kPart == SwigluPart::kDup) {
    return fabsf(up) > limit ? 0.0f : mul_rn(dh, silu);
  } else {
    const float slope = fma_rn(kHasAlpha ? mul_rn(alpha, silu) : silu, rest, sigma);
    return gate > limit ? 0.0f : mul_rn(mul_rn(dh, factor), slope);
  }
}

}  // namespace jax_fp8gemm
