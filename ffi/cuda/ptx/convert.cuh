// Element conversions of the quantisers: packed 16-bit maxima, f32 arithmetic and FP8 rounding.
//
// Every wrapper is one instruction. None touches memory, so none is volatile or clobbers "memory":
// the compiler may move or drop them. Roundings are spelled out, which makes the bits independent
// of compiler flags such as fast-math.
#pragma once

#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

constexpr uint32_t kF32Inf = 0x7f800000;  // bit patterns; a magnitude above it is a NaN
constexpr uint32_t kF32NaN = 0x7fc00000;

// Integer maxima (PTX ISA, max). Of *magnitudes*, floats with the sign bit cleared, they are float
// maxima that keep NaN: the patterns are ordered as the values, with Inf and then NaN on top.

__device__ __forceinline__ uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// NOTE: not `?:`, which the compiler turns into a branch around each use, shuffles included.
__device__ __forceinline__ uint32_t select(bool condition, uint32_t if_true, uint32_t if_false) {
  uint32_t result;
  asm("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nselp.u32 %0, %2, %3, p;\n}\n"
      : "=r"(result)
      : "r"(static_cast<uint32_t>(condition)), "r"(if_true), "r"(if_false));
  return result;
}

// Define the wrapper of an f32 instruction with one operand, or with two.
#define JAX_FP8GEMM_UNARY_F32(name, instruction)         \
  __device__ __forceinline__ float name(float a) {       \
    float result;                                        \
    asm(instruction " %0, %1;" : "=f"(result) : "f"(a)); \
    return result;                                       \
  }
#define JAX_FP8GEMM_BINARY_F32(name, instruction)                    \
  __device__ __forceinline__ float name(float a, float b) {          \
    float result;                                                    \
    asm(instruction " %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b)); \
    return result;                                                   \
  }

// f32 arithmetic (PTX ISA, add, mul, fma, div, rcp): IEEE, to nearest even.

JAX_FP8GEMM_BINARY_F32(add_rn, "add.rn.f32")

__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

JAX_FP8GEMM_BINARY_F32(mul_rn, "mul.rn.f32")

JAX_FP8GEMM_BINARY_F32(div_rn, "div.rn.f32")

JAX_FP8GEMM_UNARY_F32(rcp_rn, "rcp.rn.f32")

// The smaller and the larger of two (PTX ISA, min, max); NaN if either is one.

JAX_FP8GEMM_BINARY_F32(min_nan, "min.NaN.f32")

JAX_FP8GEMM_BINARY_F32(max_nan, "max.NaN.f32")

// Approximations (PTX ISA, ex2, rcp): relative errors of 2^-22 and 2^-23; subnormal results are 0.

JAX_FP8GEMM_UNARY_F32(ex2_approx, "ex2.approx.ftz.f32")

JAX_FP8GEMM_UNARY_F32(rcp_approx, "rcp.approx.ftz.f32")

__device__ __forceinline__ float f32_from_f16(uint16_t bits) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
  return result;
}

// FP8 (PTX ISA, cvt): to nearest even, saturated to the largest finite value, NaN to 0x7f. NOTE:
// the first source operand goes to the *upper* byte; here `low` is the byte at the lower address.

template <bool kE5M2>
__device__ __forceinline__ uint16_t round_fp8x2(float low, float high) {
  uint16_t pair;
  if constexpr (kE5M2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// Two FP8 values as two f16: exact (PTX ISA, cvt).
template <bool kE5M2>
__device__ __forceinline__ uint32_t f16x2_from_fp8x2(uint16_t pair) {
  uint32_t result;
  if constexpr (kE5M2) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(result) : "h"(pair));
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
  }
  return result;
}

// Eight FP8 bytes, x[0] at the lowest address.
template <bool kE5M2>
__device__ __forceinline__ uint2 round_fp8x8(const float (&x)[8]) {
  uint2 bytes;
  asm("mov.b32 %0, {%1, %2};"
      : "=r"(bytes.x)
      : "h"(round_fp8x2<kE5M2>(x[0], x[1])), "h"(round_fp8x2<kE5M2>(x[2], x[3])));
  asm("mov.b32 %0, {%1, %2};"
      : "=r"(bytes.y)
      : "h"(round_fp8x2<kE5M2>(x[4], x[5])), "h"(round_fp8x2<kE5M2>(x[6], x[7])));
  return bytes;
}

}  // namespace jax_fp8gemm
