#include <cstdio>

#include "calls.h"
#include "commands.h"
#include "driver/tensor_map.h"
#include "driver_rules.h"
#include "mutations.h"

namespace harness {
namespace {

using namespace jax_fp8gemm;

struct Request {
  CUtensorMapDataType type;
  uint64_t base, inner, outer, stride;
  uint32_t box_inner, box_outer;
  CUtensorMapSwizzle swizzle;
};

// Near the limits of each number. Rows do not overlap, and there is a base: of these the driver
// knows, not EncodeTensorMap2D.
Request AnyRequest(Random& random) {
  constexpr CUtensorMapDataType kTypes[] = {CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                            CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                            CU_TENSOR_MAP_DATA_TYPE_FLOAT32};
  constexpr CUtensorMapSwizzle kSwizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_64B,
                                              CU_TENSOR_MAP_SWIZZLE_128B};
  constexpr int64_t kMaxDim = int64_t{1} << 32, kMaxStride = int64_t{1} << 40;
  const auto dim = [&] { return random.PickOf({0, 1, 16, 64, 4096, kMaxDim, kMaxDim + 1}); };
  const auto box = [&] { return random.PickOf({0, 1, 4, 8, 16, 32, 64, 65, 128, 256, 257}); };
  Request r = {};
  r.type = kTypes[random.Below(3)];
  r.base = (uint64_t{1} << 40) + (random.Chance(0.9) ? 16 : 8);
  r.inner = dim();
  r.outer = dim();
  r.stride = 4 * r.inner + (random.Chance(0.9) ? 16 : 4);
  if (random.Chance(0.1)) r.stride = random.PickOf({kMaxStride - 16, kMaxStride});
  r.box_inner = box();
  r.box_outer = box();
  r.swizzle = kSwizzles[random.Below(3)];
  return r;
}

std::string DriverRule(const Request& r) {
  fake::TensorMap map = {};
  map.address = r.base;
  map.dims[0] = r.inner;
  map.dims[1] = r.outer;
  map.row_stride = r.stride;
  map.box[0] = r.box_inner;
  map.box[1] = r.box_outer;
  map.element_strides[0] = map.element_strides[1] = 1;
  map.type = r.type;
  map.swizzle = r.swizzle;
  return fake::BrokenTensorMapRule(nullptr, map);
}

}  // namespace

void RunTensorMaps(uint64_t seed, long num_maps) {
  Random random(seed);
  const auto driver = GetDriver();
  long num_encoded = 0;
  for (long i = 0; i < num_maps; ++i) {
    const Request r = AnyRequest(random);
    const auto map = EncodeTensorMap2D(**driver, r.type, reinterpret_cast<void*>(r.base), r.inner,
                                       r.outer, r.stride, r.box_inner, r.box_outer, r.swizzle,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
    const std::string rule = DriverRule(r);
    const std::string error = map.has_error() ? map.error().message() : "";
    Require(map.has_error() == !rule.empty()
                ? ""
                : "EncodeTensorMap2D and the driver must refuse the same; got '" + error +
                      "' and '" + rule + "'",
            {});
    Require(fake::TakeRefusals().empty() ? "" : "the driver refused: " + rule, {});
    num_encoded += map.has_value();
  }
  std::printf("tensor maps: %ld encoded, %ld refused\n", num_encoded, num_maps - num_encoded);
}

}  // namespace harness
