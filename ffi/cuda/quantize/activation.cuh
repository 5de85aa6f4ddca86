// The gated activations of one element and their gradients, in f32: SwiGLU (swiglu.cuh), or with
// another activation act in the place of silu
//   h     = act(gate) * up
//   dgate = (dh * up) * act'(gate)
//   dup   = dh * act(gate)
//
// act and its derivative are
//   gelu       x Phi(x)      Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)
//   gelu_tanh  x sigma(z)    sigma(z) + x sigma(z) (1 - sigma(z)) z'
//   relu2      max(x, 0)^2   2 max(x, 0)
// with Phi(x) = (1 + erf(x / sqrt(2))) / 2, and z = sqrt(8 / pi) (x + 0.044715 x^3).
// Every operation is spelled out, as in swiglu.cuh. An infinite x may give NaN. A NaN stays one.
#pragma once

#include "quantize/swiglu.cuh"

namespace jax_fp8gemm {

enum ActivationKind { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3, kClampedSwiglu = 4 };

struct Activation {
  float value;
  float slope;  // the derivative
};

// The value has a relative error below 2^-18 at |x| < 8, and 2^-16 elsewhere; below x = -13.2 it
// is 0. The slope has the same error of its larger term.
__device__ __forceinline__ Activation gelu(float x) {
  constexpr float kHalfLog2E = 0.72134752f, kInvSqrt2Pi = 0.398942280f;
  // Phi(-t) = exp(-t^2 / 2) r(t), t = |x|. r is q times a polynomial in q = 1 / (1 + p t), whose
  // coefficients make its largest relative error in 0 <= t <= 13.5 least: 2^-20.
  constexpr float kP = 0.265f;
  constexpr float kC[] = {0.105600186f,   0.107832171f, 0.0829695687f, 0.14243637f,
                          -0.0662885234f, 0.195224091f, -0.067774184f};
  const float t = fabsf(x);
  const float q = rcp_approx(fma_rn(kP, t, 1.0f));
  float polynomial = kC[6];
#pragma unroll
  for (int i = 5; i >= 0; --i) polynomial = fma_rn(polynomial, q, kC[i]);
  const float exp = ex2_approx(mul_rn(mul_rn(x, x), -kHalfLog2E));
  const float r = mul_rn(q, polynomial);
  const float tail = mul_rn(exp, r);                            // Phi(-t)
  const float slope = mul_rn(exp, fma_rn(-kInvSqrt2Pi, t, r));  // at -t; 1 less it at t
  return {fma_rn(-t, tail, fmaxf(x, 0.0f)), x > 0.0f ? add_rn(1.0f, -slope) : slope};
}

// The value has a relative error below 2^-18 at z > -20, and 2^-16 elsewhere. Below x = -10 it is
// 0. The slope has the same error of its larger term.
__device__ __forceinline__ Activation gelu_tanh(float x) {
  constexpr float kFirst = 1.59576912f, kThird = 0.0713548163f;  // z = kFirst x + kThird x^3
  // The bound, where z is 87.5, is that of sigmoid. It also keeps x^2 finite.
  const float clamped = fminf(fmaxf(x, -10.01f), 10.01f);
  const float square = mul_rn(clamped, clamped);
  const float z = mul_rn(clamped, fma_rn(square, kThird, kFirst));
  const auto [sigma, rest] = bounded_sigmoid(z);
  const float x_dz = fma_rn(x, -2.0f * kFirst, mul_rn(z, 3.0f));  // x z', and a NaN stays one
  return {mul_rn(x, sigma), fma_rn(mul_rn(sigma, rest), x_dz, sigma)};
}

__device__ __forceinline__ Activation relu2(float x) {
  const float relu = max_nan(x, 0.0f);
  return {mul_rn(relu, relu), add_rn(relu, relu)};
}

// One element of a result of the config's activation.
template <typename Config, SwigluPart kPart>
__device__ __forceinline__ float gated(float gate, float up, float dh) {
  constexpr int kActivation = Config::kActivation;
  if constexpr (kActivation == kSilu) {
    return swiglu<kPart>(gate, up, dh);
  } else if constexpr (kActivation == kClampedSwiglu) {
    return clamped_swiglu<Config, kPart>(gate, up, dh);
  } else {
    const Activation act = kActivation == kGelu       ? gelu(gate)
                           : kActivation == kGeluTanh ? gelu_tanh(gate)
                                                      : relu2(gate);
    if constexpr (kPart == SwigluPart::kH) {
      return mul_rn(act.value, up);
    } else if constexpr (kPart == SwigluPart::kDup) {
      return mul_rn(dh, act.value);
    } else {
      return mul_rn(mul_rn(dh, up), act.slope);
    }
  }
}

}  // namespace jax_fp8gemm
