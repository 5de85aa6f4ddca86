#include "quantize/quantize_params.h"

#include "buffers.h"
#include "errors.h"
#include "quantize/quantize_results.h"

namespace jax_fp8gemm {
namespace {

constexpr int64_t kMaxBatch = 65535;  // CUDA's largest second extent of a grid

// Operands between the first one and group_sizes.
size_t NumArraysBehind(const QuantizeConfig& config) {
  if (!IsGather(config)) return IsSwigluGrad(config) + (config.source == kWeightedSwigluGrad);
  return 1 + (config.input >= kFirstFp8Input) + (config.source == kWeightedGather);
}

// InvalidArgument unless `x`, of that name, is a matrix of the config's input that a kernel can
// index, or for square blocks a batch of them.
ffi::Error CheckMatrix(const QuantizeConfig& config, const char* name, const ffi::AnyBuffer& x) {
  const ffi::DataType type = kQuantizeInputs[config.input];
  const bool is_batch = x.dimensions().size() == 3 && HasBatch(config);
  if (x.element_type() != type || (x.dimensions().size() != 2 && !is_batch) || !IsAligned(x)) {
    return InvalidArgument(QuantizeOp(config), ": ", name, " must be ", ShortType(type),
                           HasBatch(config) ? "[m,k] or [b,m,k]" : "[m,k]",
                           " at a multiple of 16 bytes above 0; got ", name, " ", ShapeText(x),
                           " at ", x.untyped_data());
  }
  const auto dims = x.dimensions().last(2);
  if (dims[0] > kMaxDim || dims[1] > kMaxDim || QuantizeBatchSize(x) > kMaxBatch ||
      CeilDiv(dims[0], kWarpRows) * CeilDiv(dims[1], kScaleBlock) > INT32_MAX) {
    return InvalidArgument(QuantizeOp(config), ": m and k must be at most 2^30, b at most ",
                           kMaxBatch, ", and ", name, " less than 2^31 blocks of ", kWarpRows, "x",
                           kScaleBlock, "; got ", name, " ", ShapeText(x));
  }
  return ffi::Error::Success();
}

// The gate_up of SwiGLU, and dh for its gradient.
ffi::Error BindSwiglu(const QuantizeConfig& config, const ffi::AnyBuffer& gate_up,
                      const ffi::RemainingArgs& more, QuantizeParams& params) {
  FFI_RETURN_IF_ERROR(CheckMatrix(config, "gate_up", gate_up));
  const int64_t m = gate_up.dimensions()[0], width = gate_up.dimensions()[1];
  if (width % 2 != 0) {
    return InvalidArgument(QuantizeOp(config), ": gate_up must be (m, 2 f); got gate_up ",
                           ShapeText(gate_up));
  }
  if (config.paired != 0 && width % (2 * kScaleBlock) != 0) {
    return InvalidArgument(QuantizeOp(config), ": paired must go with gate_up (m, 2 f), f a ",
                           "multiple of 128; got gate_up ", ShapeText(gate_up));
  }
  params.m = static_cast<int32_t>(m);
  params.k = static_cast<int32_t>(config.source == kSwiglu ? width / 2 : width);
  if (config.source == kSwiglu) return ffi::Error::Success();
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer dh, more.get<ffi::AnyBuffer>(0));
  FFI_RETURN_IF_ERROR(CheckMatrix(config, "dh", dh));
  if (dh.dimensions()[0] != m || dh.dimensions()[1] != width / 2) {
    return InvalidArgument(QuantizeOp(config), ": dh must be (m, f) with gate_up (m, 2 f); got dh ",
                           ShapeText(dh), ", gate_up ", ShapeText(gate_up));
  }
  params.dh = dh.untyped_data();
  if (config.source != kWeightedSwigluGrad) return ffi::Error::Success();
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer weights, more.get<ffi::AnyBuffer>(1));
  FFI_RETURN_IF_ERROR(CheckBuffer(QuantizeOp(config), "weights", weights, ffi::DataType::F32, {m}));
  params.weights = static_cast<const float*>(weights.untyped_data());
  return ffi::Error::Success();
}

// The x whose rows are gathered, its scales if it is FP8, rows, and weights if it has them.
ffi::Error BindGather(const QuantizeConfig& config, const ffi::AnyBuffer& x,
                      const ffi::RemainingArgs& more, QuantizeParams& params) {
  const char* op = QuantizeOp(config);
  FFI_RETURN_IF_ERROR(CheckMatrix(config, "x", x));
  const int64_t s = x.dimensions()[0], k = x.dimensions()[1], kb = CeilDiv(k, kScaleBlock);
  size_t next = 0;
  if (config.input >= kFirstFp8Input) {
    FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer x_scale, more.get<ffi::AnyBuffer>(next++));
    FFI_RETURN_IF_ERROR(CheckBuffer(op, "x_scale", x_scale, ffi::DataType::F32, {s, kb}));
    params.x_scale = static_cast<const float*>(x_scale.untyped_data());
  }
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer rows, more.get<ffi::AnyBuffer>(next++));
  const int64_t m = rows.element_count();
  FFI_RETURN_IF_ERROR(CheckBuffer(op, "rows", rows, ffi::DataType::S32, {m}));
  if (m > kMaxDim || CeilDiv(m, kWarpRows) * kb > INT32_MAX) {
    return InvalidArgument(op, ": rows must be at most 2^30, in less than 2^31 blocks of ",
                           kWarpRows, "x", kScaleBlock, "; got rows ", ShapeText(rows), ", x ",
                           ShapeText(x));
  }
  if (config.source == kWeightedGather) {
    FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer weights, more.get<ffi::AnyBuffer>(next++));
    FFI_RETURN_IF_ERROR(CheckBuffer(op, "weights", weights, ffi::DataType::F32, {m}));
    params.weights = static_cast<const float*>(weights.untyped_data());
  }
  params.rows = static_cast<const int32_t*>(rows.untyped_data());
  params.m = static_cast<int32_t>(m);
  params.k = static_cast<int32_t>(k);
  params.num_sources = static_cast<int32_t>(s);
  return ffi::Error::Success();
}

// What is quantised, after a check of what it is read from. `more`: the operands behind x.
ffi::Error BindOperands(const QuantizeConfig& config, const ffi::AnyBuffer& x,
                        const ffi::RemainingArgs& more, QuantizeParams& params) {
  params.x = x.untyped_data();
  if (IsGather(config)) return BindGather(config, x, more, params);
  if (config.source != kPlain) return BindSwiglu(config, x, more, params);
  FFI_RETURN_IF_ERROR(CheckMatrix(config, "x", x));
  const auto dims = x.dimensions().last(2);
  params.m = static_cast<int32_t>(dims[0]);
  params.k = static_cast<int32_t>(dims[1]);
  return ffi::Error::Success();
}

// group_sizes and first_row are the operands from `index` on.
ffi::Error BindGroups(const char* op, const ffi::RemainingArgs& more, size_t index,
                      QuantizeParams& params) {
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer group_sizes, more.get<ffi::AnyBuffer>(index));
  FFI_ASSIGN_OR_RETURN(ffi::AnyBuffer first_row, more.get<ffi::AnyBuffer>(index + 1));
  const auto is_vector = [](const ffi::AnyBuffer& buffer) {
    return buffer.element_type() == ffi::DataType::S32 && buffer.dimensions().size() == 1 &&
           IsAligned(buffer);
  };
  const bool are_vectors = is_vector(group_sizes) && is_vector(first_row);
  const int64_t g = are_vectors ? group_sizes.dimensions()[0] : 0;
  const bool is_in_range = 1 <= g && g <= kMaxGroups && first_row.dimensions()[0] == 1;
  const int64_t num_columns =
      is_in_range ? (params.m + (kScaleBlock - 1) * g) / kScaleBlock * kScaleBlock : 0;
  // Tiles of 128 x 128: of the columns, and two rows of them for the rows of no group.
  const int64_t num_tiles = (num_columns / kScaleBlock + 2) * CeilDiv(params.k, kScaleBlock);
  if (!is_in_range || num_columns > kMaxDim || num_tiles > INT32_MAX) {
    return InvalidArgument(op, ": group_sizes must be i32[g] with 1..1024 groups, first_row ",
                           "i32[1], both at multiples of 16 bytes above 0, and the columns of all ",
                           "groups at most 2^30, in less than 2^31 tiles of 128x128; got ",
                           "group_sizes ", ShapeText(group_sizes), " at ",
                           group_sizes.untyped_data(), ", first_row ", ShapeText(first_row), " at ",
                           first_row.untyped_data(), ", m ", params.m, ", k ", params.k);
  }
  params.num_columns = static_cast<int32_t>(num_columns);
  params.num_groups = static_cast<int32_t>(g);
  params.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
  params.first_row = static_cast<const int32_t*>(first_row.untyped_data());
  return ffi::Error::Success();
}

}  // namespace

int64_t QuantizeBatchSize(const ffi::AnyBuffer& x) {
  return x.dimensions().size() == 3 ? x.dimensions()[0] : 1;
}

ffi::ErrorOr<QuantizeParams> BindQuantizeParams(const QuantizeConfig& config,
                                                const ffi::AnyBuffer& x,
                                                const ffi::RemainingArgs& more,
                                                const ffi::RemainingRets& results) {
  const char* op = QuantizeOp(config);
  const size_t num_before = NumArraysBehind(config);
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
  FFI_RETURN_IF_ERROR(BindQuantizeResults(config, x, results, params));
  return params;
}

}  // namespace jax_fp8gemm
