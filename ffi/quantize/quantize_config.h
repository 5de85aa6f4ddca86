// How one quantiser is compiled: what a config may be, and what follows from it.

#ifndef JAX_FP8GEMM_QUANTIZE_QUANTIZE_CONFIG_H_
#define JAX_FP8GEMM_QUANTIZE_QUANTIZE_CONFIG_H_

#include <cstdint>
#include <string>

#include "config_attribute.h"
#include "jit/jit.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {

// The attribute `config`: all that is compiled in.
struct QuantizeConfig {
  int32_t mode;        // which results: a QuantizeMode
  int32_t input;       // dtype of the operands: an index into kQuantizeInputs
  int32_t e5m2;        // values are e5m2, otherwise e4m3fn
  int32_t pow2_scale;  // scales are rounded up to powers of two
  int32_t ragged;      // the call has groups, each of which starts at a block of columns
  int32_t padded;      // rows of values end with zeros, at a multiple of 128 values
  int32_t paired;      // a CTA of the gradient of SwiGLU takes tiles of dgate and of dup
  int32_t source;      // what is quantised: a QuantizeSource
  int32_t activation;  // of SwiGLU and its gradient: an ActivationKind
  // Of kClampedSwiglu: the constants of swiglu.cuh, as bits of f32. Otherwise 0.
  int32_t limit, alpha, up_offset;
};

template <>
struct ConfigFields<QuantizeConfig>
    : FieldsOf<QuantizeConfig, &QuantizeConfig::activation, &QuantizeConfig::alpha,
               &QuantizeConfig::e5m2, &QuantizeConfig::input, &QuantizeConfig::limit,
               &QuantizeConfig::mode, &QuantizeConfig::padded, &QuantizeConfig::paired,
               &QuantizeConfig::pow2_scale, &QuantizeConfig::ragged, &QuantizeConfig::source,
               &QuantizeConfig::up_offset> {};

enum QuantizeMode {
  kRow,
  kColumn,
  kRowColumn,
  kBlock,
  kBlockTransposed,
  kBlockBoth,
  kRowBlockTransposed
};
enum QuantizeSource { kPlain, kSwiglu, kSwigluGrad, kGather, kWeightedGather, kWeightedSwigluGrad };

// FP8 is gathered only.
constexpr ffi::DataType kQuantizeInputs[] = {ffi::DataType::BF16, ffi::DataType::F16,
                                             ffi::DataType::F32, ffi::DataType::F8E4M3FN,
                                             ffi::DataType::F8E5M2};
constexpr int32_t kFirstFp8Input = 3;

// The operation, as errors and kernel names start: "quantize", "swiglu_quantize", ...; for any
// config.
const char* QuantizeOp(const QuantizeConfig& config);

// Whether what is quantised are rows of x by number, SwiGLU or its gradient, or that gradient.
bool IsGather(const QuantizeConfig& config);
bool IsSwiglu(const QuantizeConfig& config);
bool IsSwigluGrad(const QuantizeConfig& config);

// The name of a mode in range.
const char* QuantizeModeName(int32_t mode);

// Whether a mode in range has results of ragged columns.
bool HasRaggedColumns(int32_t mode);

// Whether a kernel stores rows of no group beside ragged columns.
bool StoresRowsAndColumns(int32_t mode);

// Whether the kernel takes a batch of matrices too.
bool HasBatch(const QuantizeConfig& config);

// InvalidArgument, with the rule, if no kernel can be built from the config.
ffi::Error CheckConfig(const QuantizeConfig& config);

// The symbol of the kernel; carries every field.
std::string KernelName(const QuantizeConfig& config);

// Warps of a CTA; must agree with QuantizeWalk in cuda/quantize/quantize_walk.cuh. In mode "row"
// each warp takes 16 rows of one k-block; in the other modes a CTA takes a tile of 128 x 128.
int64_t NumWarps(const QuantizeConfig& config);

// Dynamic shared memory of a CTA: kPrefetchBytes of its source (cuda/quantize/quantize_source.cuh)
// for each thread.
int64_t DynamicSmemBytes(const QuantizeConfig& config);

// The translation unit of a config that CheckConfig accepts.
KernelSource MakeKernelSource(const QuantizeConfig& config);

}  // namespace jax_fp8gemm

FFI_DECODE_CONFIG(QuantizeConfig);

#endif  // JAX_FP8GEMM_QUANTIZE_QUANTIZE_CONFIG_H_
