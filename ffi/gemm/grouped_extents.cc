#include "gemm/grouped_extents.h"

#include <algorithm>
#include <iterator>

#include "buffers.h"

namespace jax_fp8gemm {

ffi::Error CheckGroupedExtents(const char* op, const GemmConfig& config, Grouping grouping,
                               const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& rhs,
                               const ffi::AnyBuffer& group_sizes, const ffi::AnyBuffer& out) {
  FFI_RETURN_IF_ERROR(CheckConfig(config));
  if (GroupingOf(config) != grouping) {
    return InvalidArgument(op, ": config must have grouping ", static_cast<int32_t>(grouping),
                           "; got ", config.grouping);
  }
  const bool are_matrices = lhs.dimensions().size() == 2 && rhs.dimensions().size() == 2 &&
                            out.dimensions().size() == 2 && group_sizes.dimensions().size() == 1;
  const int64_t g = are_matrices ? group_sizes.dimensions()[0] : 0;
  bool is_in_range = 1 <= g && g <= kMaxGroups;
  if (is_in_range) {
    const int64_t extents[] = {lhs.dimensions()[0], lhs.dimensions()[1], rhs.dimensions()[0],
                               out.dimensions()[0], out.dimensions()[1]};
    const auto [least, most] = std::minmax_element(std::begin(extents), std::end(extents));
    is_in_range = *least >= 1 && *most <= kMaxDim && lhs.dimensions()[1] % 16 == 0 &&
                  out.dimensions()[1] % 8 == 0;
  }
  if (is_in_range) return ffi::Error::Success();
  return InvalidArgument(op, ": lhs, rhs and out must be matrices with extents in 1..2^30, k a ",
                         "multiple of 16 and n of 8, and group_sizes must have 1..1024 groups; ",
                         "got lhs ", ShapeText(lhs), ", rhs ", ShapeText(rhs), ", group_sizes ",
                         ShapeText(group_sizes), ", out ", ShapeText(out));
}

}  // namespace jax_fp8gemm
