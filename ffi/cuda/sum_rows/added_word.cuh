// What a thread of row_adder.cuh loads and stores at once: bf16, f16 or f32, in words of 16 bytes
// or of one element.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/ptx.cuh"

namespace jax_fp8gemm {

// kInput: 0 bf16, 1 f16, 2 f32. Mirrors kSumRowsInputs.
template <int kInput, int kBytes>
struct AddedWord {
  static constexpr int kElementBytes = kInput == 2 ? 4 : 2;
  static constexpr int kElements = kBytes / kElementBytes;

  uint32_t bits[kBytes == 16 ? 4 : 1];

  __device__ __forceinline__ void load(const uint8_t* source) {
    if constexpr (kBytes == 16) {
      load_16_bytes(bits, source);
    } else if constexpr (kBytes == 4) {
      bits[0] = __ldg(reinterpret_cast<const uint32_t*>(source));
    } else {
      bits[0] = __ldg(reinterpret_cast<const uint16_t*>(source));
    }
  }

  __device__ __forceinline__ void store(uint8_t* target) const {
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(target) = {bits[0], bits[1], bits[2], bits[3]};
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<uint32_t*>(target) = bits[0];
    } else {
      *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(bits[0]);
    }
  }

  __device__ __forceinline__ float element(int i) const {
    if constexpr (kInput == 2) return __uint_as_float(bits[i]);
    const uint32_t pair = bits[i / 2];
    if constexpr (kInput == 1) return f32_from_f16(static_cast<uint16_t>(pair >> (i % 2 * 16)));
    return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
  }

  // Rounds to nearest even.
  __device__ __forceinline__ void set(const float (&values)[kElements]) {
    if constexpr (kInput == 2) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) bits[i] = __float_as_uint(values[i]);
    } else if constexpr (kElements == 1) {
      bits[0] = pack(values[0], 0.0f);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; i += 2) bits[i / 2] = pack(values[i], values[i + 1]);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t pack(float low, float high) {
    return kInput == 1 ? pack_f16(low, high) : pack_bf16(low, high);
  }
};

}  // namespace jax_fp8gemm
