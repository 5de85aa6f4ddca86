#include "driver_rules.h"

#include <cstring>
#include <iterator>
#include <sstream>

namespace fake {
namespace {

struct Rule {
  bool holds;
  const char* text;
};

template <size_t kSize>
std::string FirstBroken(const Rule (&rules)[kSize]) {
  for (const Rule& rule : rules) {
    if (!rule.holds) return rule.text;
  }
  return "";
}

// Bytes of CU_TENSOR_MAP_DATA_TYPE_*, in the order of the enumeration.
constexpr uint64_t kTypeBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
// Bytes of CU_TENSOR_MAP_SWIZZLE_*; 0: a box row may have any width.
constexpr uint64_t kSwizzleBytes[] = {0, 32, 64, 128};

constexpr bool IsIndex(int value, size_t size) {
  return value >= 0 && static_cast<size_t>(value) < size;
}

}  // namespace

bool ParseImage(const char* image, KernelFacts* facts) {
  constexpr const char kStart[] = "fake cubin\n";
  if (std::strncmp(image, kStart, std::strlen(kStart)) != 0) return false;
  std::istringstream stream(image + std::strlen(kStart));
  std::string words[4];
  stream >> words[0] >> facts->name >> words[1] >> facts->max_threads >> words[2] >>
      facts->registers >> words[3] >> facts->param_bytes;
  return stream && words[0] == "kernel" && words[1] == "threads" && words[2] == "registers" &&
         words[3] == "param_bytes";
}

std::string BrokenTensorMapRule(const void* destination, const TensorMap& map) {
  if (!IsIndex(map.type, std::size(kTypeBytes)) ||
      !IsIndex(map.swizzle, std::size(kSwizzleBytes))) {
    return "tensor map: unknown data type or swizzle";
  }
  const uint64_t bytes = kTypeBytes[map.type], swizzle = kSwizzleBytes[map.swizzle];
  const uint64_t box_row_bytes = map.box[0] * bytes;
  constexpr uint64_t kMaxDim = uint64_t{1} << 32;
  const auto is_in = [](uint64_t value, uint64_t min, uint64_t max) {
    return min <= value && value <= max;
  };
  const Rule rules[] = {
      {reinterpret_cast<uintptr_t>(destination) % 64 == 0,
       "tensor map: must lie at a multiple of 64"},
      {map.address != 0 && map.address % 16 == 0,
       "tensor map: address must be a multiple of 16, and not null"},
      {is_in(map.dims[0], 1, kMaxDim) && is_in(map.dims[1], 1, kMaxDim),
       "tensor map: dims must be in 1..2^32"},
      {map.row_stride % 16 == 0 && map.row_stride < uint64_t{1} << 40,
       "tensor map: stride must be a multiple of 16 below 2^40"},
      {map.row_stride >= map.dims[0] * bytes, "tensor map: rows overlap"},
      {is_in(map.box[0], 1, 256) && is_in(map.box[1], 1, 256), "tensor map: box must be in 1..256"},
      {is_in(map.element_strides[0], 1, 8) && is_in(map.element_strides[1], 1, 8),
       "tensor map: element strides must be in 1..8"},
      {map.interleave == 0, "tensor map: two dimensions cannot be interleaved"},
      {box_row_bytes % 16 == 0, "tensor map: a box row must be a multiple of 16 bytes"},
      {swizzle == 0 || box_row_bytes <= swizzle, "tensor map: a box row is wider than the swizzle"},
      {is_in(map.l2_promotion, 0, 3), "tensor map: unknown L2 promotion"},
      {map.oob_fill == 0 || (map.oob_fill == 1 && map.type >= 6),
       "tensor map: only floating-point types have a NaN fill"},
  };
  return FirstBroken(rules);
}

std::string BrokenLaunchRule(const Launch& launch, const KernelFacts& kernel, int smem_limit) {
  const uint64_t threads = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
  // Registers are given out to warps, 256 at a time.
  const uint64_t warp_registers = (kernel.registers * 32 + 255) / 256 * 256;
  const Rule rules[] = {
      {1 <= launch.grid[0] && launch.grid[0] <= 0x7fffffffu, "launch: grid x must be in 1..2^31-1"},
      {1 <= launch.grid[1] && launch.grid[1] <= 65535, "launch: grid y must be in 1..65535"},
      {1 <= launch.grid[2] && launch.grid[2] <= 65535, "launch: grid z must be in 1..65535"},
      {1 <= threads && threads <= 1024 && launch.block[2] <= 64,
       "launch: a block must have 1..1024 threads"},
      {threads <= kernel.max_threads, "launch: more threads than the kernel's launch bounds"},
      {(threads + 31) / 32 * warp_registers <= 65536, "launch: out of registers"},
      {1 <= launch.cluster && launch.cluster <= 8, "launch: a portable cluster has 1..8 blocks"},
      {launch.cluster == 0 || launch.grid[0] % launch.cluster == 0,
       "launch: the grid must be whole clusters"},
      {static_cast<int>(launch.dynamic_smem_bytes) <= smem_limit,
       "launch: more dynamic shared memory than the kernel was allowed on this device"},
  };
  return FirstBroken(rules);
}

}  // namespace fake
