// Extents of operands, and the check of one buffer.

#ifndef JAX_FP8GEMM_BUFFERS_H_
#define JAX_FP8GEMM_BUFFERS_H_

#include <cstdint>
#include <initializer_list>

#include "errors.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Elements that share a scale, along one dimension.
constexpr int64_t kScaleBlock = 128;

// The kernels add to row and column indices in int32.
constexpr int64_t kMaxDim = int64_t{1} << 30;

// The group table of a grouped kernel is in shared memory.
constexpr int64_t kMaxGroups = 1024;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The type of FP8 values.
inline ffi::DataType Fp8Type(bool is_e5m2) {
  return is_e5m2 ? ffi::DataType::F8E5M2 : ffi::DataType::F8E4M3FN;
}

// Whether `buffer` starts at a multiple of 16 bytes, as the kernels read and write it, and is not
// null unless it is empty.
bool IsAligned(const ffi::AnyBuffer& buffer);

// Whether `buffer` has this type and two dimensions, and IsAligned.
bool IsMatrix(const ffi::AnyBuffer& buffer, ffi::DataType type);

// InvalidArgument unless `buffer` has this type and these dimensions and IsAligned.
ffi::Error CheckBuffer(const char* op, const char* name, const ffi::AnyBuffer& buffer,
                       ffi::DataType type, std::initializer_list<int64_t> dims);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_BUFFERS_H_
