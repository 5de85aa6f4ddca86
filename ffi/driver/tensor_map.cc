#include "driver/tensor_map.h"

namespace jax_fp8gemm {
namespace {

uint64_t ElementBytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
  }
  return 0;
}

// Width of the pattern; a box row may not be wider. 0: no limit.
uint64_t SwizzleBytes(CUtensorMapSwizzle swizzle) {
  return swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16u << static_cast<int>(swizzle);
}

}  // namespace

ffi::ErrorOr<CUtensorMap> EncodeTensorMap2D(const Driver& driver, CUtensorMapDataType type,
                                            const void* base, uint64_t inner_elems,
                                            uint64_t outer_rows, uint64_t row_stride_bytes,
                                            uint32_t box_inner, uint32_t box_outer,
                                            CUtensorMapSwizzle swizzle,
                                            CUtensorMapL2promotion promotion) {
  constexpr uint64_t kMaxDim = uint64_t{1} << 32;
  constexpr uint64_t kMaxStride = uint64_t{1} << 40;
  const uint64_t box_row_bytes = box_inner * ElementBytes(type);
  const uint64_t swizzle_bytes = SwizzleBytes(swizzle);
  const bool is_aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0 && row_stride_bytes % 16 == 0;
  if (!is_aligned || row_stride_bytes >= kMaxStride) {
    return InvalidArgument("tensor map: base and row stride must be multiples of 16 bytes, the ",
                           "stride below 2^40; got base ", base, ", row stride ", row_stride_bytes);
  }
  if (inner_elems < 1 || inner_elems > kMaxDim || outer_rows < 1 || outer_rows > kMaxDim) {
    return InvalidArgument("tensor map: dims must be in 1..2^32; got [", outer_rows, ",",
                           inner_elems, "]");
  }
  if (box_inner < 1 || box_inner > 256 || box_outer < 1 || box_outer > 256 ||
      box_row_bytes % 16 != 0 || (swizzle_bytes > 0 && box_row_bytes > swizzle_bytes)) {
    return InvalidArgument("tensor map: box dims must be in 1..256 and a box row a multiple of 16 ",
                           "bytes, at most the swizzle's; got box [", box_outer, ",", box_inner,
                           "] of ", box_row_bytes, " bytes a row, swizzle ", swizzle_bytes);
  }
  const uint64_t dims[2] = {inner_elems, outer_rows};
  const uint64_t strides[1] = {row_stride_bytes};
  const uint32_t box[2] = {box_inner, box_outer};
  const uint32_t element_strides[2] = {1, 1};
  CUtensorMap tensor_map;
  CU_RETURN_IF_ERROR(driver.cuTensorMapEncodeTiled(
      &tensor_map, type, 2, const_cast<void*>(base), dims, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return tensor_map;
}

}  // namespace jax_fp8gemm
