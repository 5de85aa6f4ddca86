// layout_list.h for the device: compiling it, by NVRTC with the options of the kernels, is the
// check.

// The quantiser that quantize/quantize.cuh defines here: one that prefetches.
struct Config {
  static constexpr int kMode = 0, kInput = 0, kSource = 1;
  static constexpr bool kE5M2 = false, kPow2Scale = false, kIsRagged = false, kIsPadded = false,
                        kIsPaired = false;
  static constexpr int kActivation = 0;
  static constexpr unsigned kLimit = 0, kAlpha = 0, kUpOffset = 0;
};
struct ColumnConfig : Config {
  static constexpr int kMode = 1;
};
struct F32Config : Config {
  static constexpr int kInput = 2;
};
struct GatherFp8Config : ColumnConfig {
  static constexpr int kInput = 3, kSource = 3;
  static constexpr bool kIsRagged = true;
};
struct GemmExample {
  static constexpr int kBlockM = 128, kBlockN = 128, kSubN = 128, kNumConsumers = 2;
  static constexpr int kNumAccums = 1, kNumStages = 5, kNumSlabs = 2;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterSize = 1, kGrouping = 0;
  static constexpr bool kIs1d1d = false, kOutF32 = false, kAccumulate = false;
  static constexpr bool kIsGated = false, kQuantizesLhs = false;
};

struct CopyConfig {
  static constexpr int kWordBytes = 16;
};

struct SumConfig {
  static constexpr int kInput = 0, kWordBytes = 16;
};

#define JAX_FP8GEMM_KERNEL device_layout
#define JAX_FP8GEMM_SMEM_BYTES 232448
#include "copy_rows/row_copier.cuh"
#include "gemm/tile.cuh"
#include "quantize/quantize.cuh"
#include "sum_rows/row_adder.cuh"

// A structured binding must name each member.
#define STRUCT(type, bytes, alignment, ...)  \
  static_assert(sizeof(type) == bytes);      \
  static_assert(alignof(type) == alignment); \
  inline void BindMembers(const type& value) { [[maybe_unused]] const auto& [__VA_ARGS__] = value; }
// __INTADDR__: what the compiler's own offsetof would be, of which NVRTC has none.
#define MEMBER(type, member, offset) static_assert(__INTADDR__(&((type*)0)->member) == offset);
#define CONSTANT(value, host, device) static_assert(device == value);
#define DEVICE_CONSTANT(value, device) static_assert(device == value);

namespace jax_fp8gemm {
#include "layout_list.h"
}  // namespace jax_fp8gemm
