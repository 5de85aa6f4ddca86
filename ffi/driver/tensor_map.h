// TMA descriptors of two-dimensional row-major arrays.

#ifndef JAX_FP8GEMM_DRIVER_TENSOR_MAP_H_
#define JAX_FP8GEMM_DRIVER_TENSOR_MAP_H_

#include <cstdint>

#include "driver/driver.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// Encodes a tensor map of `outer_rows` rows of `inner_elems` elements, `row_stride_bytes` apart,
// read or written in boxes of box_outer x box_inner elements. Elements outside the array read as
// zero and are not written. The L2 fetches at least the bytes that `promotion` names.
//
// Limits of the hardware (violations return InvalidArgument): `base` and `row_stride_bytes` are
// multiples of 16 bytes, row_stride_bytes < 2^40, dims in 1..2^32, box dims in 1..256, one box row
// is a multiple of 16 bytes and, if swizzled, at most as wide as the swizzle.
ffi::ErrorOr<CUtensorMap> EncodeTensorMap2D(const Driver& driver, CUtensorMapDataType type,
                                            const void* base, uint64_t inner_elems,
                                            uint64_t outer_rows, uint64_t row_stride_bytes,
                                            uint32_t box_inner, uint32_t box_outer,
                                            CUtensorMapSwizzle swizzle,
                                            CUtensorMapL2promotion promotion);

}  // namespace jax_fp8gemm

#endif  // JAX_FP8GEMM_DRIVER_TENSOR_MAP_H_
