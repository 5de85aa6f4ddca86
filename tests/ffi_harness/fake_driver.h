// A libcuda.so.1 without a GPU: what the harness can tell it, and what it has seen.
//
// It answers the driver calls of ffi/driver/driver.h, refuses what a driver would refuse
// (driver_rules.h) and remembers every launch. The harness links it; jax_fp8gemm opens it with
// dlopen, as it opens the real one. All functions are thread-safe.

#ifndef JAX_FP8GEMM_TESTS_FAKE_DRIVER_H_
#define JAX_FP8GEMM_TESTS_FAKE_DRIVER_H_

#include <cstdint>
#include <string>
#include <vector>

namespace fake {

// What the driver puts into the 128 bytes of a CUtensorMap. `kind` tells a map that was encoded
// from bytes that were not.
struct TensorMap {
  static constexpr uint64_t kKind = 0x70616d5f656b6166;
  uint64_t kind;
  uint64_t address;
  uint64_t dims[2];     // inner first
  uint64_t row_stride;  // bytes
  uint32_t box[2];
  uint32_t element_strides[2];
  int32_t type, interleave, swizzle, l2_promotion, oob_fill;
  uint32_t unused[13];
};
static_assert(sizeof(TensorMap) == 128);

struct Launch {
  std::string kernel;
  unsigned grid[3], block[3];
  unsigned cluster;  // CTAs along x
  unsigned dynamic_smem_bytes;
  int device;
  std::vector<uint8_t> params;  // of the only parameter
};

struct Memset {
  uint64_t address, words;
  unsigned value;
};

// What a thread asked of the device since its last TakeWork().
struct Work {
  std::vector<Launch> launches;
  std::vector<Memset> memsets;
};
Work TakeWork();

// Devices 0 .. count-1 exist; 2 by default.
void SetDeviceCount(int count);

// The device of this thread's context, or -1: it has no context.
void SetDevice(int device);

// The stream that belongs to a device.
void* StreamOf(int device);

// Lets the next cuInit take this long.
void DelayInit(int milliseconds);

// Whether a cuInit that was delayed is under way.
bool IsInInit();

// Calls so far, cuGetProcAddress included.
long NumCalls();

// Lets the nth call from now on, 1 being the next, return `error`. 0: none will fail.
void FailCall(long nth, int error);

// The function that FailCall has made fail since; "" if none.
std::string FailedCall();

// Libraries that were loaded under a kernel's name.
long NumLoads(const std::string& kernel);

// What the driver refused, as sentences; empties the list.
std::vector<std::string> TakeRefusals();

}  // namespace fake

#endif  // JAX_FP8GEMM_TESTS_FAKE_DRIVER_H_
