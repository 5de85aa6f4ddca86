#include "buffers.h"

#include <algorithm>
#include <string>

namespace jax_fp8gemm {

bool IsAligned(const ffi::AnyBuffer& buffer) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.untyped_data());
  return address % 16 == 0 && (address != 0 || buffer.element_count() == 0);
}

bool IsMatrix(const ffi::AnyBuffer& buffer, ffi::DataType type) {
  return buffer.element_type() == type && buffer.dimensions().size() == 2 && IsAligned(buffer);
}

ffi::Error CheckBuffer(const char* op, const char* name, const ffi::AnyBuffer& buffer,
                       ffi::DataType type, std::initializer_list<int64_t> dims) {
  const auto actual = buffer.dimensions();
  if (buffer.element_type() == type && IsAligned(buffer) &&
      std::equal(actual.begin(), actual.end(), dims.begin(), dims.end())) {
    return ffi::Error::Success();
  }
  std::string expected;
  for (int64_t dim : dims) expected += StrCat(expected.empty() ? "" : ",", dim);
  return InvalidArgument(op, ": ", name, " must be ", ShortType(type), "[", expected,
                         "] at a multiple of 16 bytes above 0; got ", ShapeText(buffer), " at ",
                         buffer.untyped_data());
}

}  // namespace jax_fp8gemm
