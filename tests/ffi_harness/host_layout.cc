// layout_list.h for the host: compiling it is the check.

#include <cstddef>

#include "copy_rows/copy_rows_params.h"
#include "gemm/gemm_launch.h"
#include "quantize/quantize_params.h"
#include "sum_rows/sum_rows_params.h"

// A structured binding must name each member.
#define STRUCT(type, bytes, alignment, ...)  \
  static_assert(sizeof(type) == bytes);      \
  static_assert(alignof(type) == alignment); \
  inline void BindMembers(const type& value) { [[maybe_unused]] const auto& [__VA_ARGS__] = value; }
#define MEMBER(type, member, offset) static_assert(offsetof(type, member) == offset);
#define CONSTANT(value, host, device) static_assert(host == value);
#define DEVICE_CONSTANT(value, device)

namespace jax_fp8gemm {
#include "layout_list.h"
}  // namespace jax_fp8gemm
