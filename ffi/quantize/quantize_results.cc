#include "quantize/quantize_results.h"

#include <string>
#include <vector>

#include "buffers.h"
#include "errors.h"

namespace jax_fp8gemm {
namespace {

// One result: where its address goes in the parameters, and what it must be.
struct Output {
  void* QuantizeParams::* address;
  bool is_scale;
  int64_t rows, columns;
};

// columns: of the transposed values; m unless ragged.
std::vector<Output> OutputsOfMode(const QuantizeConfig& config, int64_t m, int64_t k,
                                  int64_t columns) {
  const int32_t mode = config.mode;
  const int64_t mb = CeilDiv(columns, kScaleBlock), kb = CeilDiv(k, kScaleBlock);
  const auto stored = [&](int64_t row, int64_t blocks) {
    return config.padded ? blocks * kScaleBlock : row;
  };
  const Output values = {&QuantizeParams::values, false, m, stored(k, kb)};
  const Output transposed = {&QuantizeParams::transposed, false, k, stored(columns, mb)};
  // Rows or columns have a scale for each 128 elements, blocks one for 128 x 128.
  const bool has_blocks = mode == kBlock || mode == kBlockBoth;
  const bool has_column_scale = mode == kColumn || mode == kRowColumn;
  const Output scale = {&QuantizeParams::scale, true, has_blocks ? mb : m, kb};
  const Output transposed_scale = {&QuantizeParams::transposed_scale, true,
                                   has_column_scale ? k : kb, mb};
  if (mode == kBlockBoth) return {values, transposed, scale};
  if (StoresRowsAndColumns(mode)) return {values, scale, transposed, transposed_scale};
  if (mode == kRow || mode == kBlock) return {values, scale};
  return {transposed, transposed_scale};
}

std::vector<Output> Outputs(const QuantizeConfig& config, const QuantizeParams& params) {
  std::vector<Output> outputs = OutputsOfMode(config, params.m, params.k, params.num_columns);
  if (config.source == kWeightedSwigluGrad) {
    outputs.push_back({&QuantizeParams::dots, true, CeilDiv(params.k / 2, kScaleBlock), params.m});
  }
  return outputs;
}

}  // namespace

ffi::Error BindQuantizeResults(const QuantizeConfig& config, const ffi::AnyBuffer& x,
                               const ffi::RemainingRets& results, QuantizeParams& params) {
  const char* op = QuantizeOp(config);
  const ffi::DataType fp8 = Fp8Type(config.e5m2);
  const std::vector<Output> outputs = Outputs(config, params);
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
        (rank == 3 && dims[0] != QuantizeBatchSize(x)) || dims[rank - 2] != outputs[i].rows ||
        dims[rank - 1] != outputs[i].columns || !IsAligned(*result)) {
      return InvalidArgument(op, ": result ", i, " of mode ", mode, " must be ", ShortType(type),
                             "[", rank == 3 ? StrCat(QuantizeBatchSize(x), ",") : "",
                             outputs[i].rows, ",", outputs[i].columns,
                             "] at a multiple of 16 bytes above 0 (first operand ", ShapeText(x),
                             "); got ", ShapeText(*result), " at ", result->untyped_data());
    }
    params.*outputs[i].address = result->untyped_data();
  }
  return ffi::Error::Success();
}

}  // namespace jax_fp8gemm
