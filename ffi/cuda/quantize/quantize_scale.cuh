// Computes the scale of a scale block from its largest magnitude.
#pragma once

#include "ptx/convert.cuh"

namespace jax_fp8gemm {

// `scale` dequantises (value * scale), `factor` = 1 / scale quantises. Both are NaN for a block
// that holds an Inf or a NaN: NaN times anything rounds to the byte 0x7f, so the whole block shows
// it.
struct BlockScale {
  float scale;
  float factor;
};

// `amax`: bits of the largest magnitude as f32. Every step is IEEE f32, so NumPy gives the same
// bits.
template <typename Config>
__device__ __forceinline__ BlockScale block_scale(uint32_t amax) {
  // 2^-92: keeps scale and factor normal for both formats, and blocks of zeros finite.
  constexpr uint32_t kMinAmax = (127 - 92) << 23;
  constexpr float kMaxFp8 = Config::kE5M2 ? 57344.0f : 448.0f;

  uint32_t bits = __float_as_uint(div_rn(__uint_as_float(max_u32(amax, kMinAmax)), kMaxFp8));
  // Round up to the next power of two: a mantissa other than zero carries into the exponent.
  if constexpr (Config::kPow2Scale) bits = (bits + 0x007fffff) & 0xff800000;
  const bool is_finite = amax < kF32Inf;
  return {__uint_as_float(is_finite ? bits : kF32NaN),
          is_finite ? rcp_rn(__uint_as_float(bits)) : __uint_as_float(kF32NaN)};
}

}  // namespace jax_fp8gemm
