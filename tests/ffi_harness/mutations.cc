#include "mutations.h"

#include <cmath>

namespace harness {
namespace {

XLA_FFI_DataType AnyType(Random& random) {
  return random.Pick<XLA_FFI_DataType>(
      {XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16, XLA_FFI_DataType_F16, XLA_FFI_DataType_F8E4M3FN,
       XLA_FFI_DataType_F8E5M2, XLA_FFI_DataType_S32, XLA_FFI_DataType_F64, XLA_FFI_DataType_PRED,
       XLA_FFI_DataType_TOKEN});
}

// XLA has no negative extents.
int64_t AnyExtent(Random& random) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  return random.PickOf({0,          1,      2,          3,           8,          16,        120,
                        128,        136,    1023,       1024,        1025,       4096,      65536,
                        kLimit - 1, kLimit, kLimit + 1, kLimit + 16, 2 * kLimit, 4 * kLimit});
}

// Whether XLA could have such a buffer: it counts elements in 64 bits.
bool IsCountable(const std::vector<int64_t>& dims) {
  double elements = 1;
  for (int64_t dim : dims) elements *= dim;
  return elements < std::ldexp(1.0, 60);
}

void MutateDims(Random& random, Buffer& buffer) {
  const std::vector<int64_t> before = buffer.dims;
  const uint64_t kind = random.Below(4);
  if (kind == 0 && !buffer.dims.empty()) {
    buffer.dims.pop_back();
  } else if (kind == 1) {
    buffer.dims.insert(buffer.dims.begin(), random.Chance(0.5) ? 1 : AnyExtent(random));
  } else if (!buffer.dims.empty()) {
    int64_t& dim = buffer.dims[random.Below(buffer.dims.size())];
    dim = kind == 2 ? AnyExtent(random) : dim + random.PickOf({-1, 1, 8, 16, 128});
    if (dim < 0) dim = 0;
  }
  if (!IsCountable(buffer.dims)) buffer.dims = before;
}

void MutateBuffer(Random& random, Buffer& buffer) {
  switch (random.Below(4)) {
    case 0:
      buffer.type = AnyType(random);
      return;
    case 1:
      // Null, misaligned, or elsewhere: an accumulator must not be.
      buffer.address += random.PickOf({-static_cast<int64_t>(buffer.address), 1, 4, 8, 256});
      return;
    default:
      MutateDims(random, buffer);
  }
}

void MutateList(Random& random, std::vector<Buffer>& buffers) {
  if (!buffers.empty() && random.Chance(0.5)) {
    buffers.pop_back();
  } else {
    // Of a shape that fits nowhere, so that it cannot stand for what another mutation took away.
    buffers.push_back({"surplus", AnyType(random), {7, 7, 7}, 0x7e0000000000});
  }
}

void MutateAttributes(Random& random, Attributes& attributes) {
  Config& config = attributes.config;
  switch (random.Below(8)) {
    case 0:
      if (config.size() > 1) config.pop_back();
      return;
    case 1:
      config[random.Below(config.size())].first = "zzz";
      return;
    case 2:
      attributes.fault = static_cast<AttributeFault>(1 + random.Below(5));
      return;
    case 3:
      attributes.rows_per_group = random.PickOf({-1, 0, 1, 3, 128, INT32_MAX, INT32_MIN});
      attributes.clears_unused = random.PickOf({-1, 0, 1, 2, 3, INT32_MAX});
      return;
    case 4:
      attributes.rows_per_group.reset();
      return;
    default:
      config[random.Below(config.size())].second = AnyInt32(random);
  }
}

}  // namespace

int32_t AnyInt32(Random& random) {
  switch (random.Below(4)) {
    case 0:
      return static_cast<int32_t>(random.Below(9)) - 1;
    case 1: {
      const auto power = static_cast<int32_t>(uint32_t{1} << random.Below(32));
      return static_cast<int32_t>(static_cast<uint32_t>(power) + random.Below(3) - 1);
    }
    case 2:
      return random.PickOf({24, 48, 56, 80, 96, 112, 132, 160, 192, 224, INT32_MAX, INT32_MIN});
    default:
      return static_cast<int32_t>(random.Bits());
  }
}

void Mutate(Random& random, Case& c) {
  const uint64_t count = 1 + random.Below(3);
  for (uint64_t i = 0; i < count; ++i) {
    std::vector<Buffer>& buffers = random.Chance(0.6) ? c.args : c.rets;
    const double kind = random.Below(100);
    if (kind < 60 && !buffers.empty()) {
      MutateBuffer(random, buffers[random.Below(buffers.size())]);
    } else if (kind < 70) {
      MutateList(random, buffers);
    } else {
      MutateAttributes(random, c.attributes);
    }
  }
}

}  // namespace harness
