#include "quantize.h"

#include <string>
#include <vector>

#include "driver.h"
#include "errors.h"
#include "jit.h"
#include "quantize_config.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8gemm {
namespace {

constexpr int64_t kScaleBlock = 128;
constexpr int64_t kMaxDim = int64_t{1} << 30;  // the kernel adds to row and column indices in int32

// What one CTA does; must agree with Quantizer in cuda/quantize.cuh.
constexpr int64_t kRowWarps = 4;  // mode "row": each warp takes 16 rows of one k-block
constexpr int64_t kWarpRows = 16;
constexpr int64_t kTileWarps = 8;  // other modes: a CTA takes 128 x 128

// Mirrors QuantizeParams in cuda/quantize_source.cuh.
struct QuantizeParams {
  const void* x;   // gate_up of SwiGLU
  const void* dh;  // the gradient of SwiGLU
  void* values;
  void* scale;
  void* transposed;
  void* transposed_scale;
  int32_t m, k;                     // of what is quantised
  int32_t num_columns, num_groups;  // ragged
  const int32_t* group_sizes;
  const int32_t* first_row;
};

constexpr int64_t kMaxGroups = 1024;
constexpr int64_t kMaxBatch = 65535;  // CUDA's largest second extent of a grid

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

// Elements of a batch, which only square blocks can have.
int64_t BatchSize(const ffi::AnyBuffer& x) {
  return x.dimensions().size() == 3 ? x.dimensions()[0] : 1;
}

// InvalidArgument unless `x`, of that name, is a matrix of the config's input that a kernel can
// index, or for square blocks a batch of them.
ffi::Error CheckMatrix(const QuantizeConfig& config, const char* name, const ffi::AnyBuffer& x) {
  const ffi::DataType type = kQuantizeInputs[config.input];
  const bool is_batch = x.dimensions().size() == 3 && config.mode >= kBlock;
  if (x.element_type() != type || (x.dimensions().size() != 2 && !is_batch) || !IsAligned(x)) {
    return InvalidArgument(QuantizeOp(config), ": ", name, " must be ", ShortType(type),
                           config.mode >= kBlock ? "[m,k] or [b,m,k]" : "[m,k]",
                           " at a multiple of 16 bytes; got ", name, " ", ShapeText(x), " at ",
                           x.untyped_data());
  }
  const auto dims = x.dimensions().last(2);
  if (dims[0] > kMaxDim || dims[1] > kMaxDim || BatchSize(x) > kMaxBatch ||
      CeilDiv(dims[0], kWarpRows) * CeilDiv(dims[1], kScaleBlock) > INT32_MAX) {
    return InvalidArgument(QuantizeOp(config), ": m and k must be at most 2^30, b at most ",
                           kMaxBatch, ", and ", name, " less than 2^31 blocks of ", kWarpRows, "x",
                           kScaleBlock, "; got ", name, " ", ShapeText(x));
  }
  return ffi::Error::Success();
}

// What is quantised, after a check of what it is read from. `more`: the operands behind x.
ffi::Error BindOperands(const QuantizeConfig& config, const ffi::AnyBuffer& x,
                        const ffi::RemainingArgs& more, QuantizeParams& params) {
  const char* name = config.source == kPlain ? "x" : "gate_up";
  FFI_RETURN_IF_ERROR(CheckMatrix(config, name, x));
  const auto dims = x.dimensions().last(2);
  const int64_t m = dims[0], width = dims[1];
  params.x = x.untyped_data();
  params.m = static_cast<int32_t>(m);
  params.k = static_cast<int32_t>(config.source == kSwiglu ? width / 2 : width);
  if (config.source == kPlain) return ffi::Error::Success();
  if (width % 2 != 0) {
    return InvalidArgument(QuantizeOp(config), ": gate_up must be (m, 2 f); got gate_up ",
                           ShapeText(x));
  }
  if (config.source == kSwiglu) return ffi::Error::Success();
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer dh, more.get<ffi::AnyBuffer>(0));
  FFI_RETURN_IF_ERROR(CheckMatrix(config, "dh", dh));
  if (dh.dimensions()[0] != m || dh.dimensions()[1] != width / 2) {
    return InvalidArgument(QuantizeOp(config), ": dh must be (m, f) with gate_up (m, 2 f); got dh ",
                           ShapeText(dh), ", gate_up ", ShapeText(x));
  }
  params.dh = dh.untyped_data();
  return ffi::Error::Success();
}

// group_sizes and first_row are the operands from `index` on.
ffi::Error BindGroups(const char* op, const ffi::RemainingArgs& more, size_t index,
                      QuantizeParams& params) {
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer group_sizes, more.get<ffi::AnyBuffer>(index));
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer first_row, more.get<ffi::AnyBuffer>(index + 1));
  const auto is_vector = [](const ffi::AnyBuffer& buffer) {
    return buffer.element_type() == ffi::DataType::S32 && buffer.dimensions().size() == 1;
  };
  const bool are_vectors = is_vector(group_sizes) && is_vector(first_row);
  const int64_t g = are_vectors ? group_sizes.dimensions()[0] : 0;
  const int64_t num_columns = (params.m + (kScaleBlock - 1) * g) / kScaleBlock * kScaleBlock;
  if (g < 1 || g > kMaxGroups || first_row.dimensions()[0] != 1 || num_columns > kMaxDim) {
    return InvalidArgument(op, ": group_sizes must be i32[g] with 1..1024 groups, first_row ",
                           "i32[1], and the columns of all groups at most 2^30; got group_sizes ",
                           ShapeText(group_sizes), ", first_row ", ShapeText(first_row), ", m ",
                           params.m);
  }
  params.num_columns = static_cast<int32_t>(num_columns);
  params.num_groups = static_cast<int32_t>(g);
  params.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
  params.first_row = static_cast<const int32_t*>(first_row.untyped_data());
  return ffi::Error::Success();
}

// The kernel's parameters, after a check of every operand and result.
ffi::ErrorOr<QuantizeParams> BindParams(const QuantizeConfig& config, const ffi::AnyBuffer& x,
                                        const ffi::RemainingArgs& more,
                                        const ffi::RemainingRets& results) {
  const char* op = QuantizeOp(config);
  const size_t num_before = config.source == kSwigluGrad ? 1 : 0;  // dh
  if (more.size() != num_before + (config.ragged ? 2 : 0)) {
    return InvalidArgument(op, ": must have ", num_before + (config.ragged ? 2 : 0),
                           " operands behind the first; got ", more.size());
  }
  QuantizeParams params = {};
  FFI_RETURN_IF_ERROR(BindOperands(config, x, more, params));
  params.num_columns = params.m;
  if (config.ragged) {
    FFI_RETURN_IF_ERROR(BindGroups(op, more, num_before, params));
  }
  const ffi::DataType fp8 = config.e5m2 ? ffi::DataType::F8E5M2 : ffi::DataType::F8E4M3FN;
  const std::vector<Output> outputs = Outputs(config.mode, params.m, params.k, params.num_columns);
  const char* mode = QuantizeModeName(config.mode);
  if (results.size() != outputs.size()) {
    return InvalidArgument(op, ": mode ", mode, " must have ", outputs.size(), " results; got ",
                           results.size());
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    FFI_ASSIGN_OR_RETURN(ffi::Result<ffi::AnyBuffer> result, results.get<ffi::AnyBuffer>(i));
    const ffi::DataType type = outputs[i].is_scale ? ffi::DataType::F32 : fp8;
    const auto dims = result->dimensions();
    const size_t rank = x.dimensions().size();
    if (result->element_type() != type || dims.size() != rank ||
        (rank == 3 && dims[0] != BatchSize(x)) || dims[rank - 2] != outputs[i].rows ||
        dims[rank - 1] != outputs[i].columns || !IsAligned(*result)) {
      return InvalidArgument(op, ": result ", i, " of mode ", mode, " must be ", ShortType(type),
                             "[", rank == 3 ? StrCat(BatchSize(x), ",") : "", outputs[i].rows, ",",
                             outputs[i].columns, "] at a multiple of 16 bytes (first operand ",
                             ShapeText(x), "); got ", ShapeText(*result), " at ",
                             result->untyped_data());
    }
    params.*outputs[i].address = result->untyped_data();
  }
  return params;
}

ffi::Error Instantiate(QuantizeConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckQuantizeConfig(config));
    FFI_ASSIGN_OR_RETURN([[maybe_unused]] auto cubin, GetOrCompile(QuantizeKernelSource(config)));
    return ffi::Error::Success();
  });
}

ffi::Error Prepare(ffi::RemainingArgs, ffi::RemainingRets, QuantizeConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckQuantizeConfig(config));
    FFI_ASSIGN_OR_RETURN([[maybe_unused]] CUkernel kernel,
                         GetKernel(config, QuantizeKernelName, 0));
    return ffi::Error::Success();
  });
}

ffi::Error Execute(CUstream stream, ffi::AnyBuffer x, ffi::RemainingArgs more,
                   ffi::RemainingRets results, QuantizeConfig config) {
  return NoThrow([&]() -> ffi::Error {
    FFI_RETURN_IF_ERROR(CheckQuantizeConfig(config));
    if (x.element_count() == 0) return ffi::Error::Success();
    FFI_ASSIGN_OR_RETURN(QuantizeParams params, BindParams(config, x, more, results));
    FFI_ASSIGN_OR_RETURN(const Driver* driver, GetDriver());
    FFI_ASSIGN_OR_RETURN(CUkernel kernel, GetKernel(config, QuantizeKernelName, 0));
    const int64_t num_k_blocks = CeilDiv(params.k, kScaleBlock);
    LaunchDims dims = {};
    dims.grid_y = BatchSize(x);
    dims.grid_z = 1;
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeInstantiateHandler, Instantiate,
                              ffi::Ffi::BindInstantiate().Attr<QuantizeConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    QuantizePrepareHandler, Prepare,
    ffi::Ffi::BindPrepare().RemainingArgs().RemainingRets().Attr<QuantizeConfig>("config"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeExecuteHandler, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()  // x, or gate_up
                                  .RemainingArgs()        // dh; if ragged, group_sizes, first_row
                                  .RemainingRets()
                                  .Attr<QuantizeConfig>("config"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_fp8gemm
