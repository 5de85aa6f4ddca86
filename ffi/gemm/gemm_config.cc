#include "gemm/gemm_config.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>

#include "errors.h"
#include "hopper.h"

namespace jax_fp8gemm {
namespace {

// With cluster_k above 1: the multiplier waits for num_accums stages at once, at most as many.
constexpr int32_t kLeastSplitStages = 4;

int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// Without cluster_k, warps that quantise lhs. Each waits for every eighth stage
// (cuda/gemm/lhs_quantizer.cuh). With it, those that add do so.
constexpr int32_t kNumQuantizerWarps = 8;

// Registers a thread after the roles split. A CTA has 65536, 512 a thread of one warpgroup; at
// launch three warpgroups get 168 each, four 128. A lone consumer keeps what it was launched with,
// but where two warpgroups quantise lhs.
struct Registers {
  int32_t producer, consumer, quantizer;
};

Registers SplitRegisters(const GemmConfig& config) {
  if (config.quantizes_lhs) return {40, 232, 112};
  if (config.num_consumers == 1) return {0, 0, 0};
  if (config.num_consumers == 3) return {32, 160, 0};
  return config.is_1d1d ? Registers{24, 240, 0} : Registers{40, 232, 0};
}

// Whether cuda/ptx/wgmma.cuh has a wgmma of n columns.
bool IsWgmmaWidth(int32_t n) {
  return (n % 8 == 0 && n <= 128) || n == 144 || n == 160 || n == 192;
}

// Scales of rhs in a stage: of columns, of the 128-column blocks that a tile can lie under, or,
// where such blocks meet inside a wgmma, of the tile's parts. Mirrors Tile::kColumnScales.
int64_t NumColumnScales(const GemmConfig& config) {
  if (config.is_1d1d) return RoundUp(config.block_n, 32);
  const int64_t step = std::gcd(config.block_n, 128);
  const int64_t num_blocks = CeilDiv(128 - step + config.block_n, 128);
  if (num_blocks <= 2 && (num_blocks == 1 || 128 % config.sub_n == 0)) return 2;
  return RoundUp(config.block_n / step, 4);
}

bool IsInRange(const GemmConfig& c) {
  const auto is_in = [](int32_t value, int32_t min, int32_t max) {
    return min <= value && value <= max;
  };
  const auto is_flag = [&](int32_t value) { return is_in(value, 0, 1); };
  const auto is_cluster = [](int32_t value) { return value == 1 || value == 2 || value == 4; };
  return is_in(c.block_m, 8, 256) && is_in(c.block_n, 8, 256) && is_in(c.sub_n, 8, 256) &&
         is_in(c.num_consumers, 1, 3) && is_in(c.num_accums, 1, 8) && is_in(c.num_stages, 2, 32) &&
         is_in(c.num_slabs, 0, 32) && is_cluster(c.cluster_m) && is_cluster(c.cluster_n) &&
         is_in(c.cluster_k, 1, 8) && is_flag(c.partial_sums) &&
         c.num_sms >= c.cluster_m * c.cluster_n * c.cluster_k && is_flag(c.is_1d1d) &&
         is_flag(c.transpose_out) && is_flag(c.out_f32) && is_flag(c.accumulate) &&
         is_flag(c.lhs_e5m2) && is_flag(c.rhs_e5m2) && is_flag(c.gated) && is_flag(c.h_e5m2) &&
         is_flag(c.h_pow2_scale) && is_flag(c.quantizes_lhs) && IsActivation(c.activation) &&
         is_in(c.grouping, 0, static_cast<int32_t>(Grouping::kContraction));
}

constexpr const char* kRanges =
    "config must have block_m, block_n, sub_n in 8..256, num_consumers 1..3, num_accums 1..8, "
    "num_stages 2..32, num_slabs 0..32, cluster_m and cluster_n 1, 2 or 4, cluster_k 1..8, "
    "num_sms >= cluster_m * cluster_n * cluster_k, grouping 0..2, activation 0..4, flags 0 or 1";

// What the name of a kernel says of h.
std::string GatedName(const GemmConfig& config) {
  if (!config.gated) return "";
  return StrCat("_gated_", ActivationName(ActivationOf(config)), config.h_e5m2 ? "e5m2" : "e4m3",
                config.h_pow2_scale ? "_pow2" : "");
}

static_assert(kMaxSmemBytes == 232448, "the last rule below gives this number");

// What must hold of the activation of a config and of its result h, or null if all does.
const char* BrokenActivationRule(const GemmConfig& c) {
  if (!c.gated && (c.activation != kSilu || c.h_e5m2 || c.h_pow2_scale)) {
    return "activation, h_e5m2 and h_pow2_scale must be 0 without gated";
  }
  return HasRightConstants(ActivationOf(c)) ? nullptr : kConstantsRule;
}

// What must hold in a config with cluster_k above 1, or null if all does.
const char* BrokenSplitRule(const GemmConfig& c) {
  const bool is_partial = c.partial_sums != 0;
  if (!is_partial && c.cluster_k != 4 && c.cluster_k != 8) {
    return "cluster_k must be 1, 4 or 8 without partial_sums";
  }
  const bool has_rows = c.block_m % 8 == 0 && c.block_m <= (is_partial ? 64 : 16);
  const bool is_tile = has_rows && c.block_n == 64 && c.sub_n == c.block_m &&
                       c.num_consumers == 2 && c.num_slabs == 0;
  if (!is_tile || c.cluster_m * c.cluster_n != 1 || c.num_stages < kLeastSplitStages ||
      c.num_accums > kLeastSplitStages) {
    return "cluster_k must go with tiles of 8x64 or 16x64 (partial_sums: of 8, 16 .. 64 rows), "
           "sub_n = block_m, 2 consumers, no slabs, no other cluster, and num_accums <= 4 <= "
           "num_stages";
  }
  if (GroupingOf(c) != Grouping::kNone || c.is_1d1d || c.transpose_out || c.accumulate || c.gated) {
    return "cluster_k must go with dense products with 128x128 scales of rhs, without "
           "transpose_out and accumulate";
  }
  if (c.quantizes_lhs && (is_partial || c.block_m > kMostQuantizedRows)) {
    return "cluster_k with quantizes_lhs must go with block_m 8, without partial_sums";
  }
  return nullptr;
}

// What must hold in a config whose fields are in range, or null if all does.
const char* BrokenRule(const GemmConfig& c) {
  if (const char* rule = BrokenActivationRule(c)) return rule;
  if (c.cluster_k > 1) return BrokenSplitRule(c);
  if (c.partial_sums != 0) return "partial_sums must go with cluster_k above 1";
  // First: what follows divides by the number of wgmmas side by side.
  if (c.block_n % c.sub_n != 0 || !IsWgmmaWidth(c.sub_n)) {
    return "block_n must be a multiple of sub_n, and sub_n 8, 16 .. 128, 144, 160 or 192";
  }
  const Grouping grouping = GroupingOf(c);
  const int64_t num_row_subs = CeilDiv(c.block_m, 64 * c.num_consumers);  // 64 rows each
  const int64_t num_batches = num_row_subs * (c.block_n / c.sub_n);       // of one k-block
  const int64_t num_slabs_stored = num_row_subs * (c.block_n / SlabColumns(c));
  const int64_t num_sums = (num_row_subs * c.block_n + c.num_accums * c.sub_n) / 2;  // per thread
  const int32_t set_registers = SplitRegisters(c).consumer;
  const int64_t num_registers = set_registers == 0 ? 255 : set_registers;
  const struct {
    bool holds;
    const char* text;
  } rules[] = {
      {c.cluster_m == 1 || c.cluster_n == 1, "cluster_m or cluster_n must be 1"},
      {c.block_m % (64 * c.num_consumers) == 0, "block_m must be a multiple of 64 * num_consumers"},
      // 8 rows: the 128-byte swizzle repeats after them.
      {c.block_m % (8 * c.cluster_n) == 0 && c.block_n % (8 * c.cluster_m) == 0,
       "block_m / cluster_n and block_n / cluster_m must be multiples of 8"},
      // A stage is given back when its last batch is promoted; fewer stages would deadlock.
      {c.num_stages > CeilDiv(c.num_accums - 1, num_batches),
       "num_stages must exceed the k-blocks that num_accums batches reach over"},
      {num_sums < num_registers, "sums and accumulators must fit the registers of a consumer"},
      {grouping == Grouping::kNone || c.cluster_m * c.cluster_n == 1,
       "grouped products have no clusters"},
      {grouping != Grouping::kRows || !c.is_1d1d, "groups of rows must have 128x128 scales of rhs"},
      {grouping != Grouping::kRows || !c.accumulate, "groups of rows have no accumulate"},
      // A box of row scales is 4 longer, and at most 256.
      {grouping != Grouping::kRows || c.block_m < 256,
       "groups of rows must have block_m below 256"},
      {!c.transpose_out || (!c.is_1d1d && grouping != Grouping::kRows),
       "transpose_out must go with 128x128 scales of rhs, and not with groups of rows"},
      {!c.transpose_out || c.num_slabs == 0 || c.block_n % 64 == 0,
       "transpose_out with slabs needs block_n a multiple of 64"},
      {!c.accumulate || c.out_f32, "accumulate must go with out_f32"},
      // A thread holds gate and up of the same elements, and stages h in one slab.
      {!c.gated || (grouping == Grouping::kRows && !c.out_f32 && c.block_n == 256 &&
                    c.sub_n == 128 && num_row_subs == 1 && c.num_slabs == 1),
       "gated must go with groups of rows, bf16, block_n 256, sub_n 128, 64 rows for each "
       "consumer, and a slab"},
      {!c.quantizes_lhs || (grouping == Grouping::kNone && !c.is_1d1d && !c.transpose_out &&
                            !c.accumulate && c.num_consumers == 1 && c.block_m == 64 &&
                            c.cluster_m * c.cluster_n == 1 && c.num_stages >= kNumQuantizerWarps),
       "quantizes_lhs must go with dense products with 128x128 scales of rhs, without "
       "transpose_out and accumulate, block_m 64, one consumer, no cluster and at least 8 stages"},
      // The ring of slabs restarts at each tile: it must end a tile where it began.
      {c.num_slabs == 0 || c.num_slabs >= num_slabs_stored || num_slabs_stored % c.num_slabs == 0,
       "num_slabs must divide the slabs of a consumer's part of the tile"},
      // Half of the ring is written at a time.
      {c.num_slabs < 2 || c.num_slabs >= num_slabs_stored ||
           num_slabs_stored % (c.num_slabs / 2) == 0,
       "num_slabs / 2 must divide the slabs of a consumer's part of the tile"},
      // Tile::kExchanges: up to 96 rows of 64 columns are staged at a time.
      {grouping != Grouping::kRows || c.out_f32 || c.gated || c.num_consumers != 2 ||
           c.num_accums != 1 || c.block_m != 128 || c.block_n != 256 || c.num_slabs >= 2,
       "groups of rows with bf16, 128x256, 2 consumers and num_accums 1 need 2 slabs or more"},
      {DynamicSmemBytes(c) <= kMaxSmemBytes, "shared memory must be at most 232448 bytes"},
  };
  for (const auto& rule : rules) {
    if (!rule.holds) return rule.text;
  }
  return nullptr;
}

}  // namespace

std::string KernelName(const GemmConfig& config) {
  static constexpr const char* kGroupings[] = {"", "grouped_", "grouped_k_", "bad_grouping_"};
  return StrCat(
      "fp8_gemm_", kGroupings[config.grouping & 3], config.is_1d1d ? "1d1d_" : "1d2d_",
      config.transpose_out ? "transposed_" : "", config.block_m, "x", config.block_n,
      GatedName(config), config.out_f32 ? "_f32" : "_bf16", config.accumulate ? "_accumulate" : "",
      config.lhs_e5m2 ? "_e5m2" : "_e4m3", config.rhs_e5m2 ? "_e5m2" : "_e4m3", "_sub",
      config.sub_n, "_consumers", config.num_consumers, "_accums", config.num_accums, "_stages",
      config.num_stages, "_slabs", config.num_slabs, "_cluster", config.cluster_m, "x",
      config.cluster_n, config.cluster_k > 1 ? StrCat("x", config.cluster_k) : "",
      config.partial_sums ? "_partial_sums" : "", config.quantizes_lhs ? "_quantizes_lhs" : "");
}

int64_t MostSplitK(const GemmConfig& config) {
  constexpr int64_t kBarriersBytes = 1024;
  const int64_t stage_bytes = (int64_t{config.block_m} + config.block_n) * kScaleBlock;
  if (config.partial_sums) {
    // Mirrors PartialSums in cuda/gemm/partial_sums.cuh: barriers, sums, scales, stages.
    const int64_t sums_bytes = RoundUp(int64_t{config.block_m} * (config.block_n + 4) * 4, 1024);
    const int64_t room =
        kMaxSmemBytes - kBarriersBytes - sums_bytes - kLeastSplitStages * stage_bytes;
    return room / 1024 * 1024 / (config.block_m * 4) * config.cluster_k * kScaleBlock;
  }
  // Mirrors SplitK in cuda/gemm/split_k.cuh: barriers, results and scales, stages.
  constexpr int64_t kMostKBlocks = 16 * 32;
  const int64_t k_block_bytes = config.block_m * (config.block_n / config.cluster_k + 1) * 4;
  const int64_t room = kMaxSmemBytes - kBarriersBytes - kLeastSplitStages * stage_bytes;
  return std::min(kMostKBlocks, room / 1024 * 1024 / k_block_bytes) * kScaleBlock;
}

int64_t NumThreads(const GemmConfig& config) {
  const int64_t num_quantizers = config.quantizes_lhs && config.cluster_k == 1 ? 2 : 0;
  return 128 * (config.num_consumers + 1 + num_quantizers);
}

int64_t NumSlabs(const GemmConfig& config) {
  return config.out_f32 && config.block_n % 32 != 0 ? 0 : config.num_slabs;
}

int64_t SlabColumns(const GemmConfig& config) {
  if (config.block_n % 32 != 0) return config.block_n;
  return config.out_f32 || config.block_n % 64 != 0 ? 32 : 64;
}

int64_t DynamicSmemBytes(const GemmConfig& config) {
  if (config.cluster_k > 1) return kMaxSmemBytes;
  // Mirrors Tile::SharedStorage in cuda/gemm/tile.cuh, member by member.
  const int64_t num_stages = config.num_stages;
  int64_t bytes = num_stages * (int64_t{config.block_m} + config.block_n) * kScaleBlock;
  const int64_t slab_bytes = kSlabRows * (config.block_n % 32 != 0 ? 2 * config.block_n : 128);
  bytes += config.num_consumers * std::max<int64_t>(16, NumSlabs(config) * slab_bytes);
  const int64_t num_row_scales = int64_t{config.block_m} + 32;
  bytes = RoundUp(bytes, 128) + num_stages * num_row_scales * 4;
  bytes = RoundUp(bytes, 128) + num_stages * NumColumnScales(config) * 4;
  bytes = RoundUp(bytes, 8) + num_stages * 16;                           // full and empty barriers
  bytes += GroupingOf(config) == Grouping::kRows ? 2 * (8 + 8 + 4) : 4;  // queue
  bytes += GroupingOf(config) == Grouping::kNone ? 4 : (3 * (kMaxGroups + 2) + 3) * 4;
  return RoundUp(bytes, 1024);
}

ffi::Error CheckConfig(const GemmConfig& config) {
  if (!IsInRange(config)) {
    // Nothing is computed from such a config: any product of its fields may overflow.
    return InvalidArgument(
        "gemm: ", kRanges, "; got ", KernelName(config), ", grouping ", config.grouping,
        ", num_sms ", config.num_sms, ", flags ", config.is_1d1d, " ", config.transpose_out, " ",
        config.out_f32, " ", config.accumulate, " ", config.lhs_e5m2, " ", config.rhs_e5m2, " ",
        config.gated, " ", config.h_e5m2, " ", config.h_pow2_scale, " ", config.quantizes_lhs);
  }
  const char* rule = BrokenRule(config);
  if (rule == nullptr) return ffi::Error::Success();
  return InvalidArgument("gemm: ", rule, "; got ", KernelName(config), ", num_sms ", config.num_sms,
                         ", ", DynamicSmemBytes(config), " bytes of shared memory, gated ",
                         config.gated, ", activation ", config.activation, ", ",
                         ConstantsText(ActivationOf(config)), ", h_e5m2 ", config.h_e5m2,
                         ", h_pow2_scale ", config.h_pow2_scale);
}

KernelSource MakeKernelSource(const GemmConfig& config) {
  const std::string name = KernelName(config);
  const Registers registers = SplitRegisters(config);
  std::string text =
      StrCat("#define JAX_FP8GEMM_KERNEL ", name, "\n#define JAX_FP8GEMM_LHS_TYPE \"",
             config.lhs_e5m2 ? "e5m2" : "e4m3", "\"\n#define JAX_FP8GEMM_RHS_TYPE \"",
             config.rhs_e5m2 ? "e5m2" : "e4m3", "\"\n#define JAX_FP8GEMM_SMEM_BYTES ",
             DynamicSmemBytes(config), "\nstruct Config {\n");
  const auto add = [&](const char* member, auto value) {
    const char* type = std::is_same_v<decltype(value), bool> ? "bool" : "int";
    text += StrCat("  static constexpr ", type, " ", member, " = ", value, ";\n");
  };
  add("kBlockM", config.block_m);
  add("kBlockN", config.block_n);
  add("kSubN", config.sub_n);
  add("kNumConsumers", config.num_consumers);
  add("kNumAccums", config.num_accums);
  add("kNumStages", config.num_stages);
  add("kNumSlabs", NumSlabs(config));
  add("kClusterM", config.cluster_m);
  add("kClusterN", config.cluster_n);
  add("kClusterSize", int64_t{config.cluster_m} * config.cluster_n);
  add("kProducerRegs", registers.producer);
  add("kConsumerRegs", registers.consumer);
  add("kQuantizerRegs", registers.quantizer);
  add("kGrouping", config.grouping);
  add("kIs1d1d", config.is_1d1d != 0);
  add("kTransposesOut", config.transpose_out != 0);
  add("kOutF32", config.out_f32 != 0);
  add("kAccumulate", config.accumulate != 0);
  add("kIsGated", config.gated != 0);
  add("kQuantizesLhs", config.quantizes_lhs != 0);
  add("kLhsE5M2", config.lhs_e5m2 != 0);
  if (config.gated) {
    add("kE5M2", config.h_e5m2 != 0);
    add("kPow2Scale", config.h_pow2_scale != 0);
    text += ActivationMembers(ActivationOf(config));
  }
  if (config.cluster_k > 1) add("kClusterK", config.cluster_k);
  const char* kernel = config.partial_sums    ? "partial_sums"
                       : config.cluster_k > 1 ? "split_k"
                                              : "gemm";
  return {name, StrCat(text, "};\n#include \"gemm/", kernel, ".cuh\"\n")};
}

}  // namespace jax_fp8gemm
