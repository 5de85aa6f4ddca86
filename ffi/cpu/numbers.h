// Numbers of 16 bits as floats, and floats rounded to FP8, in plain C++.
//
// NOTE: compile with -ffp-contract=off. A product that is fused with a sum rounds once.

#ifndef JAX_FP8GEMM_CPU_NUMBERS_H_
#define JAX_FP8GEMM_CPU_NUMBERS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace jax_fp8gemm {

inline int32_t BitsOf(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOf(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

struct Bf16 {
  uint16_t bits;
  operator float() const { return FloatOf(int32_t{bits} << 16); }
};

struct F16 {
  uint16_t bits;
  operator float() const {
    const int32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    // Not as an f32 denormal that is scaled up: XLA flushes those to zero.
    if (exponent == 0) return FloatOf(sign | BitsOf(static_cast<float>(mantissa) * 0x1p-24f));
    const int32_t wide = exponent == 31 ? 255 : exponent + 127 - 15;
    return FloatOf(sign | wide << 23 | mantissa << 13);
  }
};

// An FP8 type whose numbers have kMantissa bits behind the leading one.
template <int kMantissaBits, int kExponentBias, int kMax>
struct Fp8 {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = kExponentBias;
  static constexpr int32_t kMaxCode = kMax;  // the largest number, as a byte
};
struct E4m3 : Fp8<3, 7, 0x7e> {
  static constexpr float kFmax = 448;
};
struct E5m2 : Fp8<2, 15, 0x7b> {
  static constexpr float kFmax = 57344;
};

// The byte of a number, rounded to nearest even and saturated.
template <typename Format>
uint8_t Round(float x) {
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr int32_t kSmallestNormalBits = (128 - Format::kBias) << 23;
  // The ulp of this number is the spacing of the denormals.
  constexpr int32_t kDenormalBits = (127 + 23 + 1 - Format::kBias - Format::kMantissa) << 23;
  const int32_t bits = BitsOf(x), size = bits & 0x7fffffff;
  const int32_t denormal = BitsOf(FloatOf(size) + FloatOf(kDenormalBits)) - kDenormalBits;
  const int32_t carry = (size >> kShift & 1) + (1 << (kShift - 1)) - 1;
  const int32_t rounded = (size + carry) >> kShift;
  const int32_t normal = rounded - ((127 - Format::kBias) << Format::kMantissa);
  // All ones or zeros. A branch would keep the compiler from rounding several numbers at once.
  const int32_t is_denormal = -(size < kSmallestNormalBits);
  const int32_t code = std::min(normal, Format::kMaxCode);
  return static_cast<uint8_t>((denormal & is_denormal) | (code & ~is_denormal) |
                              (bits >> 24 & 0x80));
}

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_CPU_NUMBERS_H_
