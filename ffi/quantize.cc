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
                                      ::xla::ffi::StructMember<int32_t>("pow2_scale"),
                                      ::xla::ffi::StructMember<int32_t>("ragged"));

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

// Mirrors QuantizeParams in cuda/quantize_source.cuh.
struct QuantizeParams {
  const void* x;
  void* values;
  void* scale;
  void* transposed;
  void* transposed_scale;
  int32_t m, k;
  int32_t num_columns, num_groups;  // ragged
  const int32_t* group_sizes;
  const int32_t* first_row;
};

constexpr int64_t kMaxGroups = 1024;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

ffi::Error CheckConfig(const QuantizeConfig& config) {
  if (config.mode < 0 || config.mode > kBlockBoth || config.input < 0 || config.input > 2) {
    return InvalidArgument("quantize: mode must be 0..5 and input 0..2; got mode ", config.mode,
                           ", input ", config.input);
  }
  if (config.ragged != 0 && config.mode != kColumn && config.mode != kRowColumn) {
    return InvalidArgument("quantize: ragged must go with mode column or row_column; got mode ",
                           kModes[config.mode]);
  }
  return ffi::Error::Success();
}

std::string KernelName(const QuantizeConfig& config) {
  return StrCat("quantize_", config.ragged ? "ragged_" : "", kModes[config.mode], "_",
                ShortType(kQuantizeInputs[config.input]), config.e5m2 ? "_e5m2" : "_e4m3",
                config.pow2_scale ? "_pow2" : "");
}

// One result: where its address goes in the parameters, and what it must be.
struct Output {
  void* QuantizeParams::* address;
  bool is_scale;
  int64_t rows, columns;
};

// columns: of the transposed values; m unless ragged.
std::vector<Output> Outputs(int32_t mode, int64_t m, int64_t k, int64_t columns) {
  const int64_t mb = CeilDiv(columns, kScaleBlock), kb = CeilDiv(k, kScaleBlock);
  const Output values = {&QuantizeParams::values, false, m, k};
  const Output transposed = {&QuantizeParams::transposed, false, k, columns};
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

ffi::Error BindGroups(const ffi::RemainingArgs& groups, int64_t m, QuantizeParams& params) {
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer group_sizes, groups.get<ffi::AnyBuffer>(0));
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer first_row, groups.get<ffi::AnyBuffer>(1));
  const auto is_vector = [](const ffi::AnyBuffer& buffer) {
    return buffer.element_type() == ffi::DataType::S32 && buffer.dimensions().size() == 1;
  };
  const bool are_vectors = is_vector(group_sizes) && is_vector(first_row);
  const int64_t g = are_vectors ? group_sizes.dimensions()[0] : 0;
  const int64_t num_columns = (m + (kScaleBlock - 1) * g) / kScaleBlock * kScaleBlock;
  if (g < 1 || g > kMaxGroups || first_row.dimensions()[0] != 1 || num_columns > kMaxDim) {
    return InvalidArgument("quantize: group_sizes must be i32[g] with 1..1024 groups, first_row ",
                           "i32[1], and the columns of all groups at most 2^30; got group_sizes ",
                           ShapeText(group_sizes), ", first_row ", ShapeText(first_row), ", m ", m);
  }
  params.num_columns = static_cast<int32_t>(num_columns);
  params.num_groups = static_cast<int32_t>(g);
  params.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
  params.first_row = static_cast<const int32_t*>(first_row.untyped_data());
  return ffi::Error::Success();
}

// The kernel's parameters, after a check of every result.
ffi::ErrorOr<QuantizeParams> BindParams(const QuantizeConfig& config, const ffi::AnyBuffer& x,
                                        const ffi::RemainingArgs& groups,
                                        const ffi::RemainingRets& results) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1];
  const ffi::DataType fp8 = config.e5m2 ? ffi::DataType::F8E5M2 : ffi::DataType::F8E4M3FN;
  QuantizeParams params = {};
  params.num_columns = static_cast<int32_t>(m);
  if (groups.size() != (config.ragged ? 2 : 0)) {
    return InvalidArgument("quantize: group_sizes and first_row must be given if and only if ",
                           "ragged is set; got ", groups.size(), " more operands");
  }
  if (config.ragged) {
    FFI_RETURN_IF_ERROR(BindGroups(groups, m, params));
  }
  const std::vector<Output> outputs = Outputs(config.mode, m, k, params.num_columns);
  if (results.size() != outputs.size()) {
    return InvalidArgument("quantize: mode ", kModes[config.mode], " must have ", outputs.size(),
                           " results; got ", results.size());
  }
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

ffi::Error Execute(CUstream stream, ffi::AnyBuffer x, ffi::RemainingArgs groups,
                   ffi::RemainingRets results, QuantizeConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckConfig(config));
    if (x.element_count() == 0) return ffi::Error::Success();
    FFI_RETURN_IF_ERROR(CheckOperand(config, x));
    FFI_ASSIGN_OR_RETURN(QuantizeParams params, BindParams(config, x, groups, results));
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(KernelName(config), 0));
    const int64_t num_k_blocks = CeilDiv(params.k, kScaleBlock);
    LaunchDims dims = {};
    dims.grid_y = dims.grid_z = 1;
    if (config.mode == kRow) {
      dims.grid_x = CeilDiv(CeilDiv(params.m, kWarpRows) * num_k_blocks, kRowWarps);
      dims.block_x = 32 * kRowWarps;
    } else {
      int64_t num_m_blocks = CeilDiv(params.num_columns, kScaleBlock);
      if (config.ragged && config.mode == kRowColumn) {
        // Blocks of columns, and at most two more for the ends of the rows of no group.
        num_m_blocks = (params.m + (kScaleBlock - 1) * (params.num_groups + 2)) / kScaleBlock;
      }
      dims.grid_x = num_m_blocks * num_k_blocks;
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
                       ";\n  static constexpr bool kIsRagged = ", config.ragged != 0,
                       ";\n  static constexpr int kSource = 0;\n};\n#include \"quantize.cuh\"\n")};
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeInstantiateHandler, Instantiate,
                              ffi::Ffi::BindInstantiate().Attr<QuantizeConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    QuantizePrepareHandler, Prepare,
    ffi::Ffi::BindPrepare().RemainingArgs().RemainingRets().Attr<QuantizeConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeExecuteHandler, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .RemainingArgs()        // group_sizes, first_row, if ragged
                                  .RemainingRets()
                                  .Attr<QuantizeConfig>("config"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_fp8gemm
