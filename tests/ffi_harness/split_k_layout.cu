// What the CTAs of a cluster send each other in split_k.cuh: every element of a tile arrives once,
// where the thread that adds it looks. Compiling it, by NVRTC, is the check.

template <int kRows, int kSplit>
struct SplitConfig {
  static constexpr int kBlockM = kRows, kClusterK = kSplit;
  static constexpr bool kQuantizesLhs = false;
};

#define JAX_FP8GEMM_SMEM_BYTES 232448
#include "gemm/split_k_adder.cuh"

namespace jax_fp8gemm {

// Walks what wgmma leaves in a warpgroup: accumulator 4e + r of a lane is row 16 warp + lane / 4 +
// 8 (r / 2) of rhs, and row 8e + 2 (lane % 4) + r % 2 of lhs (PTX ISA, wgmma, register fragments).
template <int kRows, int kSplit>
constexpr bool arrives_where_it_is_added() {
  using Adder = SplitKAdder<SplitConfig<kRows, kSplit>>;
  bool is_taken[kSplit][kRows * 64 / kSplit] = {};
  for (int warp = 0; warp < 4; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int accum = 0; accum < kRows / 2; ++accum) {
        const int e = accum / 4, r = accum % 4;
        const int column = 16 * warp + lane / 4 + 8 * (r / 2), row = 8 * e + 2 * (lane % 4) + r % 2;
        const int cta = Adder::cta_of(warp, r / Adder::kVector);
        const int place = Adder::place_of(lane, e) + r % Adder::kVector;
        if (cta >= kSplit || place >= Adder::kSlot || is_taken[cta][place]) return false;
        is_taken[cta][place] = true;
        const int thread = place % Adder::kAdders, sum = place / Adder::kAdders;
        if (8 * sum + Adder::row_of(thread) != row) return false;
        if (cta * (64 / kSplit) + Adder::column_of(thread) != column) return false;
      }
    }
  }
  return true;
}

static_assert(arrives_where_it_is_added<8, 4>());
static_assert(arrives_where_it_is_added<16, 4>());
static_assert(arrives_where_it_is_added<8, 8>());
static_assert(arrives_where_it_is_added<16, 8>());

// The largest k of ffi/gemm/gemm_config.cc leaves room for 4 stages of the most rows.
static_assert(1024 + SplitKAdder<SplitConfig<16, 4>>::smem_bytes(22400 / 128) +
                  4 * (16 + 64) * 128 <=
              JAX_FP8GEMM_SMEM_BYTES);

}  // namespace jax_fp8gemm
