#include "quantize.h"

#include <string>
#include <vector>

#include "driver.h"
#include "errors.h"
#include "jit.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp8gemm::QuantizeConfig,
                                      ::xla::ffi::StructMember<int32_t>("mode"),
                                      ::xla::ffi::StructMember<int32_t>("input"),
                                      ::xla::ffi::StructMember<int32_t>("e5m2"),
                                      ::xla::ffi::StructMember<int32_t>("pow2_scale"));

namespace jax_fp8gemm {
namespace {

constexpr const char* kModes[] = {"row",   "column",           "row_column",
                                  "block", "block_transposed", "block_both"};
enum Mode { kRow, kColumn, kRowColumn, kBlock, kBlockTransposed, kBlockBoth };

constexpr int64_t kScaleBlock = 128;
constexpr int64_t kMaxDim = int64_t{1} << 30;  // the kernel adds to row and column indices in int32

// What one CTA does; must agree with Quantizer in cuda/quantize.cuh.
constexpr int64_t kRowWarps = 4;  // mode "row": each warp takes 16 rows of one k-block
constexpr int64_t kWarpRows = 16;
constexpr int64_t kTileWarps = 8;  // other modes: a CTA takes 128 x 128

// Mirrors QuantizeParams in cuda/quantize.cuh.
struct QuantizeParams {
  const void* x;
  void* values;
  void* scale;
  void* transposed;
  void* transposed_scale;
  int32_t m, k;
};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

ffi::Error CheckConfig(const QuantizeConfig& config) {
  if (config.mode < 0 || config.mode > kBlockBoth || config.input < 0 || config.input > 2) {
    return InvalidArgument("quantize: mode must be 0..5 and input 0..2; got mode ", config.mode,
                           ", input ", config.input);
  }
  return ffi::Error::Success();
}

std::string KernelName(const QuantizeConfig& config) {
  return StrCat("quantize_", kModes[config.mode], "_", ShortType(kQuantizeInputs[config.input]),
                config.e5m2 ? "_e5m2" : "_e4m3", config.pow2_scale ? "_pow2" : "");
}

// One result: where its address goes in the parameters, and what it must be.
struct Output {
  void* QuantizeParams::* address;
  bool is_scale;
  int64_t rows, columns;
};

std::vector<Output> Outputs(int32_t mode, int64_t m, int64_t k) {
  const int64_t mb = CeilDiv(m, kScaleBlock), kb = CeilDiv(k, kScaleBlock);
  const Output values = {&QuantizeParams::values, false, m, k};
  const Output transposed = {&QuantizeParams::transposed, false, k, m};
  const Output row_scale = {&QuantizeParams::scale, true, m, kb};
  const Output column_scale = {&QuantizeParams::transposed_scale, true, k, mb};
  const Output block_scale = {&QuantizeParams::scale, true, mb, kb};
  switch (mode) {
    case kRow:
      return {values, row_scale};
    case kColumn:
      return {transposed, column_scale};
    case kRowColumn:
      return {values, row_scale, transposed, column_scale};
    case kBlock:
      return {values, block_scale};
    case kBlockTransposed:
      return {transposed, {&QuantizeParams::transposed_scale, true, kb, mb}};
    default:
      return {values, transposed, block_scale};
  }
}

bool IsAligned(const ffi::AnyBuffer& buffer) {
  return reinterpret_cast<uintptr_t>(buffer.untyped_data()) % 16 == 0;
}

ffi::Error CheckOperand(const QuantizeConfig& config, const ffi::AnyBuffer& x) {
  const ffi::DataType type = kQuantizeInputs[config.input];
  const auto dims = x.dimensions();
  if (x.element_type() != type || dims.size() != 2 || !IsAligned(x)) {
    return InvalidArgument("quantize: x must be ", ShortType(type),
                           "[m,k] at a multiple of 16 bytes; got x ", ShapeText(x), " at ",
                           x.untyped_data());
  }
  if (dims[0] > kMaxDim || dims[1] > kMaxDim ||
      CeilDiv(dims[0], kWarpRows) * CeilDiv(dims[1], kScaleBlock) > INT32_MAX) {
    return InvalidArgument(
        "quantize: m and k must be at most 2^30, and x less than 2^31 blocks of ", kWarpRows, "x",
        kScaleBlock, "; got x ", ShapeText(x));
  }
  return ffi::Error::Success();
}

// The kernel's parameters, after a check of every result.
ffi::ErrorOr<QuantizeParams> BindParams(const QuantizeConfig& config, const ffi::AnyBuffer& x,
                                        const ffi::RemainingRets& results) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1];
  const ffi::DataType fp8 = config.e5m2 ? ffi::DataType::F8E5M2 : ffi::DataType::F8E4M3FN;
  const std::vector<Output> outputs = Outputs(config.mode, m, k);
  if (results.size() != outputs.size()) {
    return InvalidArgument("quantize: mode ", kModes[config.mode], " must have ", outputs.size(),
                           " results; got ", results.size());
  }
  QuantizeParams params = {};
  params.x = x.untyped_data();
  params.m = static_cast<int32_t>(m);
  params.k = static_cast<int32_t>(k);
  for (size_t i = 0; i < outputs.size(); ++i) {
    FFI_ASSIGN_OR_RETURN(ffi::Result<ffi::AnyBuffer> result, results.get<ffi::AnyBuffer>(i));
    const ffi::DataType type = outputs[i].is_scale ? ffi::DataType::F32 : fp8;
    const auto dims = result->dimensions();
    if (result->element_type() != type || dims.size() != 2 || dims[0] != outputs[i].rows ||
        dims[1] != outputs[i].columns || !IsAligned(*result)) {
      return InvalidArgument("quantize: result ", i, " of mode ", kModes[config.mode], " must be ",
                             ShortType(type), "[", outputs[i].rows, ",", outputs[i].columns,
                             "] at a multiple of 16 bytes (x ", ShapeText(x), "); got ",
                             ShapeText(*result), " at ", result->untyped_data());
    }
    params.*outputs[i].address = result->untyped_data();
  }
  return params;
}

ffi::Error Instantiate(QuantizeConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    FFI_ASSIGN_OR_RETURN([[maybe_unused]] auto cubin, GetOrCompile(QuantizeSource(config)));
    return ffi::Error::Success();
  });
}

ffi::Error Prepare(ffi::RemainingArgs, ffi::RemainingRets, QuantizeConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    FFI_ASSIGN_OR_RETURN([[maybe_unused]] CUkernel kernel, GetKernel(KernelName(config), 0));
    return ffi::Error::Success();
  });
}

ffi::Error Execute(CUstream stream, ffi::AnyBuffer x, ffi::RemainingRets results,
                   QuantizeConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    if (x.element_count() == 0) return ffi::Error::Success();
    FFI_RETURN_IF_ERROR(CheckOperand(config, x));
    FFI_ASSIGN_OR_RETURN(QuantizeParams params, BindParams(config, x, results));
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(KernelName(config), 0));
    const int64_t num_k_blocks = CeilDiv(params.k, kScaleBlock);
    LaunchDims dims = {};
    dims.grid_y = dims.grid_z = 1;
    if (config.mode == kRow) {
      dims.grid_x = CeilDiv(CeilDiv(params.m, kWarpRows) * num_k_blocks, kRowWarps);
      dims.block_x = 32 * kRowWarps;
    } else {
      dims.grid_x = CeilDiv(params.m, kScaleBlock) * num_k_blocks;
      dims.block_x = 32 * kTileWarps;
    }
    void* arguments[] = {&params};
    return LaunchKernel(*driver, kernel, dims, stream, arguments);
  });
}

}  // namespace

KernelSource QuantizeSource(const QuantizeConfig& config) {
  const std::string name = KernelName(config);
  return {name, StrCat("#define JAX_FP8GEMM_KERNEL ", name, "\n",
                       "struct Config {\n"
                       "  static constexpr int kMode = ",
                       config.mode, ";\n  static constexpr int kInput = ", config.input,
                       ";\n  static constexpr bool kE5M2 = ", config.e5m2 != 0,
                       ";\n  static constexpr bool kPow2Scale = ", config.pow2_scale != 0,
                       ";\n};\n#include \"quantize.cuh\"\n")};
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeInstantiateHandler, Instantiate,
                              ffi::Ffi::BindInstantiate().Attr<QuantizeConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    QuantizePrepareHandler, Prepare,
    ffi::Ffi::BindPrepare().RemainingArgs().RemainingRets().Attr<QuantizeConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeExecuteHandler, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<QuantizeConfig>("config"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_fp8gemm
