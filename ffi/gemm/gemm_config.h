// How one GEMM kernel is compiled: what a config may be, and what follows from it.

#ifndef JAX_FP8GEMM_GEMM_GEMM_CONFIG_H_
#define JAX_FP8GEMM_GEMM_GEMM_CONFIG_H_

#include <cstdint>
#include <string>

#include "activation.h"
#include "buffers.h"
#include "config_attribute.h"
#include "jit/jit.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// What the groups of a product cut: nothing, the rows of lhs and out, or the contraction. The
// kernels have the same enum in cuda/groups.cuh.
enum class Grouping : int32_t { kNone, kRows, kContraction };

// The attribute `config`: all that is compiled in, and num_sms. A tile is what one CTA computes.
struct GemmConfig {
  int32_t block_m, block_n;      // the tile
  int32_t sub_n;                 // columns of one wgmma
  int32_t num_consumers;         // warpgroups that share the rows of the tile
  int32_t num_accums;            // wgmma batches in flight, per consumer
  int32_t num_stages;            // k-blocks of 128 that shared memory holds
  int32_t num_slabs;             // per consumer, to stage out for TMA; 0: store directly
  int32_t cluster_m, cluster_n;  // CTAs that share a tile of rhs, of lhs; 1, 2 or 4, one of them 1
  int32_t cluster_k;             // CTAs that divide a tile's k-blocks; 1, 4 or 8 (split_k.cuh)
  int32_t partial_sums;          // they add up a part each; cluster_k 2..8 (partial_sums.cuh)
  int32_t quantizes_lhs;         // lhs is bf16, and quantised to lhs_e5m2 (lhs_rows.cuh)
  int32_t is_1d1d;               // rhs has 1x128 scales, otherwise 128x128
  int32_t transpose_out;         // out is stored transposed: (n, m)
  int32_t out_f32;               // out is f32, otherwise bf16
  int32_t accumulate;            // out = accum + product; f32 only
  int32_t lhs_e5m2, rhs_e5m2;    // values are e5m2, otherwise e4m3fn
  int32_t grouping;              // what the groups of the product cut: a Grouping
  int32_t gated;                 // the product is [gate | up], and the result its h, quantised
  int32_t activation;            // gated: an ActivationKind, with its constants. Otherwise 0
  int32_t limit, alpha, up_offset;
  int32_t h_e5m2, h_pow2_scale;  // gated: values are e5m2; scales are rounded up to powers of two
  int32_t num_sms;               // CTAs to launch at most; not compiled in
};

template <>
struct ConfigFields<GemmConfig>
    : FieldsOf<GemmConfig, &GemmConfig::accumulate, &GemmConfig::activation, &GemmConfig::alpha,
               &GemmConfig::block_m, &GemmConfig::block_n, &GemmConfig::cluster_k,
               &GemmConfig::cluster_m, &GemmConfig::cluster_n, &GemmConfig::gated,
               &GemmConfig::grouping, &GemmConfig::h_e5m2, &GemmConfig::h_pow2_scale,
               &GemmConfig::is_1d1d, &GemmConfig::lhs_e5m2, &GemmConfig::limit,
               &GemmConfig::num_accums, &GemmConfig::num_consumers, &GemmConfig::num_slabs,
               &GemmConfig::num_sms, &GemmConfig::num_stages, &GemmConfig::out_f32,
               &GemmConfig::partial_sums, &GemmConfig::quantizes_lhs, &GemmConfig::rhs_e5m2,
               &GemmConfig::sub_n, &GemmConfig::transpose_out, &GemmConfig::up_offset> {};

inline Grouping GroupingOf(const GemmConfig& config) {
  return static_cast<Grouping>(config.grouping);
}

inline Activation ActivationOf(const GemmConfig& config) {
  return {config.activation, config.limit, config.alpha, config.up_offset};
}

// Rows of out that a slab stages.
constexpr int64_t kSlabRows = 64;

// The slabs of a consumer: none for f32 in tiles whose columns 32 does not divide.
int64_t NumSlabs(const GemmConfig& config);

// Columns of out in a slab: 128 bytes, or 64 of bf16 where block_n is no multiple of 64, or all of
// the tile's where it is no multiple of 32.
int64_t SlabColumns(const GemmConfig& config);

// The most rows of lhs that a kernel with quantizes_lhs takes.
constexpr int64_t kMostQuantizedRows = 8;

// Threads of a CTA. Mirrors Tile::kNumThreads in cuda/gemm/tile.cuh.
int64_t NumThreads(const GemmConfig& config);

// Rows of lhs that the last tile of a group loads at a time.
constexpr int64_t kPartRows = 32;

// The largest k of a config with cluster_k above 1: results, or scales, of more k-blocks leave no
// room in shared memory for 4 stages, or have no barrier.
int64_t MostSplitK(const GemmConfig& config);

// The symbol of the kernel; carries every field but num_sms.
std::string KernelName(const GemmConfig& config);

// Dynamic shared memory of a CTA.
int64_t DynamicSmemBytes(const GemmConfig& config);

// InvalidArgument, with the rule and the config, if no kernel can be built from it or launched.
ffi::Error CheckConfig(const GemmConfig& config);

// The translation unit of a config that CheckConfig accepts.
KernelSource MakeKernelSource(const GemmConfig& config);

}  // namespace jax_fp8gemm

FFI_DECODE_CONFIG(GemmConfig);

#endif  // JAX_FP8GEMM_GEMM_GEMM_CONFIG_H_
