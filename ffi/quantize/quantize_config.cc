#include "quantize/quantize_config.h"

#include <string>

#include "activation.h"
#include "errors.h"

namespace jax_fp8gemm {
namespace {

constexpr const char* kOps[] = {
    "quantize",        "swiglu_quantize",          "swiglu_grad_quantize",
    "gather_quantize", "weighted_gather_quantize", "weighted_swiglu_grad_quantize"};
constexpr const char* kModes[] = {"row",
                                  "column",
                                  "row_column",
                                  "block",
                                  "block_transposed",
                                  "block_both",
                                  "row_block_transposed"};

Activation ActivationOf(const QuantizeConfig& config) {
  return {config.activation, config.limit, config.alpha, config.up_offset};
}

// InvalidArgument unless the activation is one, of a source that has it, with its constants.
ffi::Error CheckActivation(const QuantizeConfig& config) {
  const Activation activation = ActivationOf(config);
  if (!IsActivation(activation.kind) || (activation.kind != kSilu && !IsSwiglu(config))) {
    return InvalidArgument(QuantizeOp(config), ": activation must be 0..4, and 0 for a source ",
                           "other than 1, 2 and 5; got activation ", activation.kind, ", source ",
                           config.source);
  }
  if (!HasRightConstants(activation)) {
    return InvalidArgument(QuantizeOp(config), ": ", kConstantsRule, "; got activation ",
                           activation.kind, ", ", ConstantsText(activation));
  }
  return ffi::Error::Success();
}

}  // namespace

const char* QuantizeOp(const QuantizeConfig& config) {
  const bool is_known = config.source >= kPlain && config.source <= kWeightedSwigluGrad;
  return is_known ? kOps[config.source] : "quantize";
}

bool IsGather(const QuantizeConfig& config) {
  return config.source == kGather || config.source == kWeightedGather;
}

bool IsSwiglu(const QuantizeConfig& config) {
  return config.source == kSwiglu || IsSwigluGrad(config);
}

bool IsSwigluGrad(const QuantizeConfig& config) {
  return config.source == kSwigluGrad || config.source == kWeightedSwigluGrad;
}

const char* QuantizeModeName(int32_t mode) { return kModes[mode]; }

bool HasRaggedColumns(int32_t mode) { return mode != kRow && mode != kBlock && mode != kBlockBoth; }

bool StoresRowsAndColumns(int32_t mode) {
  return mode == kRowColumn || mode == kRowBlockTransposed;
}

bool HasBatch(const QuantizeConfig& config) {
  return kBlock <= config.mode && config.mode <= kBlockBoth && config.ragged == 0;
}

ffi::Error CheckConfig(const QuantizeConfig& config) {
  const char* op = QuantizeOp(config);
  const int32_t last_input = IsGather(config) ? 4 : kFirstFp8Input - 1;
  const auto is_in = [](int32_t value, int32_t last) { return 0 <= value && value <= last; };
  if (!is_in(config.mode, kRowBlockTransposed) || !is_in(config.input, last_input) ||
      !is_in(config.source, kWeightedSwigluGrad) || !is_in(config.e5m2, 1) ||
      !is_in(config.pow2_scale, 1) || !is_in(config.ragged, 1) || !is_in(config.padded, 1) ||
      !is_in(config.paired, 1)) {
    return InvalidArgument(op, ": mode must be 0..6, input 0..", last_input,
                           " and source 0..5, flags 0 or 1; got mode ", config.mode, ", input ",
                           config.input, ", source ", config.source, ", e5m2 ", config.e5m2,
                           ", pow2_scale ", config.pow2_scale, ", ragged ", config.ragged,
                           ", padded ", config.padded, ", paired ", config.paired);
  }
  const bool has_ragged_rows = config.mode == kRow && IsSwiglu(config);
  if (config.ragged != 0 && !HasRaggedColumns(config.mode) && !has_ragged_rows) {
    return InvalidArgument(op,
                           ": ragged must go with mode column, row_column, block_transposed or ",
                           "row_block_transposed, or with row of source 1, 2 or 5; got mode ",
                           kModes[config.mode], ", source ", config.source);
  }
  if (config.padded != 0 && (config.source != kPlain || config.ragged != 0)) {
    return InvalidArgument(op, ": padded must go with source 0 and without ragged; got source ",
                           config.source, ", ragged ", config.ragged);
  }
  if (config.paired != 0 && (!IsSwigluGrad(config) || config.input != 0)) {
    return InvalidArgument(op, ": paired must go with source 2 or 5 and input 0; got source ",
                           config.source, ", input ", config.input);
  }
  if (config.source == kWeightedSwigluGrad && config.input == 1) {
    return InvalidArgument(op, ": input must be 0 or 2 (bf16, f32); got 1");
  }
  if (config.source == kWeightedSwigluGrad && config.ragged == 0) {
    return InvalidArgument(op, ": ragged must be 1; got 0, mode ", kModes[config.mode]);
  }
  if (config.source != kPlain && config.mode != kRow && config.ragged == 0) {
    return InvalidArgument(op, ": mode must be row, or one of columns with ragged; got mode ",
                           kModes[config.mode], ", ragged ", config.ragged);
  }
  return CheckActivation(config);
}

std::string KernelName(const QuantizeConfig& config) {
  return StrCat(QuantizeOp(config), "_", ActivationName(ActivationOf(config)),
                config.ragged ? "ragged_" : "", config.padded ? "padded_" : "",
                config.paired ? "paired_" : "", kModes[config.mode], "_",
                ShortType(kQuantizeInputs[config.input]), config.e5m2 ? "_e5m2" : "_e4m3",
                config.pow2_scale ? "_pow2" : "");
}

int64_t NumWarps(const QuantizeConfig& config) { return config.mode == kRow ? 4 : 8; }

int64_t DynamicSmemBytes(const QuantizeConfig& config) {
  // 8 rows of each thread, by 8 bytes of FP8 or by 16 of every operand of SwiGLU.
  int64_t row_bytes = 0;
  if (config.input >= kFirstFp8Input) {
    row_bytes = 8;
  } else if (IsSwiglu(config) && kQuantizeInputs[config.input] != ffi::DataType::F32) {
    row_bytes = (IsSwigluGrad(config) ? 3 : 2) * 16;
  }
  return 32 * NumWarps(config) * 8 * row_bytes;
}

KernelSource MakeKernelSource(const QuantizeConfig& config) {
  const std::string name = KernelName(config);
  return {name, StrCat("#define JAX_FP8GEMM_KERNEL ", name, "\n",
                       "struct Config {\n"
                       "  static constexpr int kMode = ",
                       config.mode, ";\n  static constexpr int kInput = ", config.input,
                       ";\n  static constexpr bool kE5M2 = ", config.e5m2 != 0,
                       ";\n  static constexpr bool kPow2Scale = ", config.pow2_scale != 0,
                       ";\n  static constexpr bool kIsRagged = ", config.ragged != 0,
                       ";\n  static constexpr bool kIsPadded = ", config.padded != 0,
                       ";\n  static constexpr bool kIsPaired = ", config.paired != 0,
                       ";\n  static constexpr int kSource = ", config.source, ";\n",
                       ActivationMembers(ActivationOf(config)),
                       "};\n#include \"quantize/quantize.cuh\"\n")};
}

}  // namespace jax_fp8gemm
